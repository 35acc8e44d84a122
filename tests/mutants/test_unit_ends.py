"""What becomes of a mutant by how its cases and tests end, and by how its process does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from loragate.core.verdict import Failure, Verdict
from loragate.core.warm_server import ServerDied
from loragate.mutants import runner, unit_runs
from loragate.mutants.host_tests import SelectedTests
from loragate.mutants.model import Fate, Group, Mutant
from loragate.mutants.units import Ended, Kind, Order, Transcript, Unit, read_transcript

UNITS = [Unit(Kind.TEST, name, 20.0) for name in ("first", "second", "third")]
MUTANT = Mutant(
    id="one",
    module="m.py",
    start=0,
    end=1,
    new="y",
    operator="edit",
    group=Group.BLIND,
    line=1,
    end_line=1,
)
FAILED = Ended(unit="third", verdict=Verdict.FAIL, judge="host test")


@pytest.mark.parametrize("verdict", Verdict)
def test_a_unit_kills_unless_a_gate_in_which_it_ends_so_has_exit_code_0(verdict: Verdict) -> None:
    harmless = verdict in (Verdict.PASS, Verdict.SKIP)
    assert Ended(unit="case", verdict=verdict).fails_gate is not harmless


def test_tests_that_only_the_mutant_has_run_behind_those_that_reach_it() -> None:
    plugin = SelectedTests(
        {"t.py::last": 1.0, "t.py::first": 1.0},
        60.0,
        frozenset({"t.py::first", "t.py::last", "t.py::other"}),
        *([None] * 3),  # type: ignore[arg-type]
    )
    names = ["t.py::first", "t.py::new", "t.py::other", "t.py::last"]
    items: list[Any] = [SimpleNamespace(nodeid=name) for name in names]
    plugin.pytest_collection_modifyitems(items)
    assert [item.nodeid for item in items] == ["t.py::last", "t.py::first", "t.py::new"]


@pytest.mark.parametrize("code", pytest.ExitCode)
def test_a_session_that_breaks_off_by_itself_has_failed(
    code: pytest.ExitCode, tmp_path: Path
) -> None:
    transcript: Any = Transcript(tmp_path / "transcript.jsonl")
    nothing: Any = None
    plugin = SelectedTests({}, 60.0, frozenset(), transcript, nothing, tmp_path)
    plugin.conclude(code)
    harmless = code in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)
    assert plugin.failed is not harmless
    ended = read_transcript(tmp_path / "transcript.jsonl").ended
    assert [one.fails_gate for one in ended] == ([] if harmless else [True])


class Process:
    """In place of a server: a process that writes this much, and ends so."""

    def __init__(self, begun: Sequence[str], ended: Sequence[Ended], finished: bool) -> None:
        self.begun, self.ended, self.finished = begun, ended, finished
        self.failure: Failure | None = None

    def __call__(self, server: object, order: Order, patience_s: float) -> Failure | None:
        transcript = Transcript(Path(order.transcript))
        for name in self.begun:
            transcript.begin(name)
            for ended in self.ended:
                if ended.unit == name:
                    transcript.end(ended)
        if self.finished:
            transcript.finish()
        return self.failure


def killer(
    process: Process, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[Ended | None, list[str]]:
    monkeypatch.setattr(unit_runs, "run_order", process)
    setup: Any = SimpleNamespace(known="known", least_deadline_s=60.0)
    server: Any = None
    ended, ran = unit_runs.run_units(UNITS, folder, folder, setup, server)
    return ended, [unit.name for unit in ran]


def passed(name: str) -> Ended:
    return Ended(unit=name, verdict=Verdict.PASS)


def test_a_process_that_goes_to_its_end_without_a_failure_kills_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = Process(["first", "second"], [passed("first"), passed("second")], finished=True)
    assert killer(process, tmp_path, monkeypatch) == (None, ["first", "second"])


def test_a_process_that_ends_well_in_the_middle_of_a_unit_has_crashed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # as with os._exit(0)
    process = Process(["first", "second"], [passed("first")], finished=False)
    ended, ran = killer(process, tmp_path, monkeypatch)
    assert ended is not None
    assert (ended.unit, ended.verdict, ended.kind) == ("second", Verdict.FAIL, Failure.CRASH)
    assert ran == ["first"]


def test_a_process_that_dies_between_two_units_says_nothing_of_either(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = Process(["first"], [passed("first")], finished=False)
    process.failure = Failure.CRASH
    with pytest.raises(ServerDied, match="ended between two units"):
        killer(process, tmp_path, monkeypatch)


@pytest.mark.parametrize("leg_kills", [False, True])
def test_what_survives_the_quick_units_meets_the_compile_leg_and_then_all_others(
    leg_kills: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[str]] = []
    of_leg = Ended(unit="compile leg", verdict=Verdict.FAIL) if leg_kills else None

    def killing_unit(units: Sequence[Unit], planted: object) -> Ended | None:
        asked.append([unit.name for unit in units])
        return FAILED if UNITS[-1] in units else None

    monkeypatch.setattr(runner, "killing_unit", killing_unit)
    monkeypatch.setattr(runner, "killing_compile_leg", lambda planted: of_leg)
    planted: Any = None
    assert runner._killer(UNITS, planted, True) == (of_leg or FAILED)
    assert asked == ([["first"]] if leg_kills else [["first"], ["second", "third"]])
    assert runner._killer(UNITS, planted, False) == FAILED


@pytest.mark.parametrize("needs_gpu", [False, True])
@pytest.mark.parametrize("on_gpu", [False, True])
def test_a_mutant_that_shows_on_a_gpu_only_has_survived_once_it_was_planted_there(
    needs_gpu: bool, on_gpu: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(runner, "plant", lambda mutant, target: None)
    monkeypatch.setattr(runner, "_killer", lambda units, planted, compiles: None)
    setup: Any = SimpleNamespace(
        gpu=on_gpu,
        units_of=lambda mutant, place: (),
        cache_of=lambda mutant, place, folder: tmp_path,
        compiles=lambda mutant: False,
    )
    nobody: Any = None
    mutant = replace(MUTANT, needs_gpu=needs_gpu)
    result = runner.run_one(mutant, "x = 1\n", setup, nobody, nobody)
    assert result.fate is (Fate.NEEDS_GPU if needs_gpu and not on_gpu else Fate.SURVIVED)
