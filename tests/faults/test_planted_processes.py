"""What the end of a planted process says, and what it is told to run; without any process."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from loragate.core.verdict import Failure, OracleName, Verdict
from loragate.faults import launches, runner
from loragate.faults.gate_contents import GateContents
from loragate.faults.model import Edit, Fault, GateItem, Group, Killer, Needs, Part, Sighting
from loragate.faults.order import IMPORT, Begun, Order, Recorder, Suite
from loragate.faults.runner import Setup, run_order
from loragate.matrix.case import Case, Dtype, Site, Tier
from loragate.matrix.ids import case_id

CASE = Case(
    site=Site.DENSE_DELTA,
    tokens=1,
    in_features=8,
    slices=(8,),
    rank=2,
    slots=1,
    dtype=Dtype.BF16,
    oracles=(OracleName.REFERENCE, OracleName.GUARD, OracleName.COMPILE),
)
ITEM = GateItem(Part.CASE, case_id(CASE))
GATE = GateContents(Tier.SMOKE, {ITEM.id: CASE}, frozenset(), frozenset())
FAULT = Fault(
    name="a-fault",
    edit=Edit("lorakernels.batch.metadata", "old", "new"),
    group=Group.METADATA,
    source="own",
    why="It is wrong.",
    killers=(Killer(ITEM, OracleName.REFERENCE),),
)
FINE = Sighting(judge="reference", case=ITEM.id, verdict=Verdict.PASS, part=Part.CASE)
BEGUN = Begun("exact", ITEM.id, Part.CASE)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Sighting, ...]]:
    """What is seen of a process that writes a transcript and ends with `failure`."""
    monkeypatch.setattr(runner, "plant", lambda edit, package, target: None)

    def seen(
        write: Callable[[Recorder], None], failure: Failure | None = None
    ) -> tuple[Sighting, ...]:
        def run(line: bytes, size: object, patience_s: float) -> Failure | None:
            write(Recorder(Path(os.fsdecode(line)) / "transcript.jsonl"))
            return failure

        server: Any = SimpleNamespace(run=run)
        return run_order(Order(module=None, suite=Suite.GATE), None, Setup(), server)

    return seen


def test_a_process_that_goes_to_its_end_has_seen_what_it_wrote(seen: Any) -> None:
    def write(recorder: Recorder) -> None:
        recorder.record(FINE)
        recorder.finish()

    assert seen(write) == (FINE,)


@pytest.mark.parametrize("failure", [Failure.CRASH, Failure.HANG])
def test_a_process_that_dies_behind_its_last_judge_has_not_ended_well(
    failure: Failure, seen: Any
) -> None:
    def write(recorder: Recorder) -> None:
        recorder.record(FINE)
        recorder.finish()

    first, death = seen(write, failure)
    assert first == FINE
    assert death.failure is failure
    assert death.verdict in (Verdict.FAIL, Verdict.INFRA)


@pytest.mark.parametrize("failure", [None, Failure.CRASH, Failure.HANG])
def test_a_process_that_ends_before_its_end_has_failed_in_the_judge_that_ran(
    failure: Failure | None, seen: Any
) -> None:
    def write(recorder: Recorder) -> None:
        recorder.record(FINE)
        recorder.begin(BEGUN)

    first, death = seen(write, failure)
    assert first == FINE
    assert (death.judge, death.case, death.part) == ("exact", ITEM.id, Part.CASE)
    # one that ends well in the middle, as by os._exit(0), has crashed
    assert (death.verdict, death.failure) == (Verdict.FAIL, failure or Failure.CRASH)


@pytest.mark.parametrize("begun", [None, Begun(IMPORT)])
def test_a_process_that_dies_before_any_judge_ran_proves_nothing(
    begun: Begun | None, seen: Any
) -> None:
    def write(recorder: Recorder) -> None:
        if begun:
            recorder.begin(begun)

    (death,) = seen(write, Failure.CRASH)
    assert death.verdict is Verdict.INFRA
    (late,) = seen(write, Failure.HANG)
    assert late.verdict is Verdict.FAIL


def test_a_process_that_dies_between_two_judges_blames_neither(seen: Any) -> None:
    def write(recorder: Recorder) -> None:
        recorder.begin(Begun("reference", ITEM.id, Part.CASE))
        recorder.record(FINE)

    first, death = seen(write, Failure.CRASH)
    assert first == FINE
    assert (death.verdict, death.case) == (Verdict.INFRA, "")


@pytest.fixture
def setup(monkeypatch: pytest.MonkeyPatch) -> Setup:
    monkeypatch.setattr(runner, "gate_contents", lambda tier: GATE)
    return Setup()


@pytest.mark.parametrize(
    ("by", "oracles"),
    [
        (OracleName.REFERENCE, ("reference",)),
        (OracleName.GUARD, ("reference", "guard")),
        (OracleName.COMPILE, ("reference", "compile")),
    ],
)
def test_a_quick_run_leaves_out_slow_oracles_but_for_those_that_must_detect_the_fault(
    by: OracleName, oracles: tuple[str, ...], setup: Setup
) -> None:
    fault = replace(FAULT, killers=(Killer(ITEM, by),))
    (case,) = runner._order(fault, Suite.GATE, replace(setup, quick=True)).cases
    assert case.oracles == oracles
    (whole,) = runner._order(fault, Suite.GATE, setup).cases
    assert whole == CASE


def test_what_must_detect_faults_of_a_gpu_runs_without_them_where_there_is_one(
    setup: Setup,
) -> None:
    on_gpu = replace(FAULT, name="on-gpu", needs=Needs.GPU)
    assert runner._killers_here([on_gpu], setup) == []
    assert runner._killers_here([on_gpu], replace(setup, gpu=True)) == [*FAULT.killers]


@pytest.mark.parametrize("wrong", launches.ARCHS)
def test_a_launch_is_judged_for_every_gpu(wrong: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def compiled(provider: str, label: str, arch: int, contents: object) -> Iterator[int]:
        yield arch

    def judged(arch: int, record: object, *, subject: str, triton: str) -> Any:
        verdict = Verdict.FAIL if arch == wrong else Verdict.PASS
        return SimpleNamespace(
            verdict=verdict, resources=None, kernel="k", arch=f"sm_{arch}", message="is wrong"
        )

    monkeypatch.setattr(launches, "triton_version", lambda: "3.7.1")
    monkeypatch.setattr(launches, "compile_launch", compiled)
    monkeypatch.setattr(launches, "judge", judged)
    found = launches.sighting_of("label")
    assert (found.verdict, found.message) == (Verdict.FAIL, f"k for sm_{wrong}: is wrong")
