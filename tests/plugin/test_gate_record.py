"""The record of a gate run in a results file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from loragate.cli import main
from loragate.core.checkout import Tree
from loragate.core.child_process import Watch
from loragate.core.gpus import ListedGpu
from loragate.core.machine import Machine
from loragate.core.verdict import ExitCode
from loragate.events.log import EventLog
from loragate.matrix.case import Tier
from loragate.matrix.plan import Plan
from loragate.matrix.selection import Selection
from loragate.records import recorder
from loragate.records.results import read_section, update_section
from loragate.report.record import outcome, section_of
from loragate.report.summary import summarize
from loragate.run import opening
from loragate.run.planning import plan_selection

MATRIX = Path(__file__).parent / "misbehaving" / "long_sleep.yaml"


def gate(tmp_path: Path, *arguments: str) -> int:
    report = str(tmp_path / "report")
    return main(["gate", "--subject=torch", f"--matrix={MATRIX}", f"--report={report}", *arguments])


def test_a_recorded_run_says_what_was_expected_executed_and_judged(tmp_path: Path) -> None:
    record = tmp_path / "results.json"
    assert gate(tmp_path, "--record", str(record), "--commit", "abc") == 0
    section = read_section(record, "gate")
    assert section is not None
    (count,) = [row for row in section["counts"] if row["expected"]]
    assert count["executed"] == count["passed"] == count["expected"] > 0
    assert section["verdict"] == "pass"
    assert section["subjects"] == ["torch"]
    assert section["legs"][0]["duration_s"] > 0
    assert section["versions"]["torch"]
    assert section["commit"]
    assert section["gpus"] == 0
    assert section["matrix"] == ["tests/plugin/misbehaving/long_sleep.yaml"]


def test_a_run_of_several_draws_or_repeats_does_not_replace_the_plain_run() -> None:
    assert section_of(["torch"], draws=1, repeats=1) == "gate"
    sections = {section_of(["torch"], draws=draws, repeats=1 + (draws == 1)) for draws in (1, 20)}
    assert sections == {"gate_seeds_torch"}


def test_subjects_that_ran_apart_have_records_of_their_own() -> None:
    both = {section_of(names, draws=20, repeats=1) for names in (["b", "a"], ["a", "b"])}
    assert both == {"gate_seeds_a_b"}
    assert section_of(["a"], draws=20, repeats=1) not in both


def test_a_file_that_cannot_be_added_to_is_refused_before_anything_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = tmp_path / "results.json"
    record.write_text("not json")
    assert gate(tmp_path, "--record", str(record)) == 4
    assert str(record) in capsys.readouterr().err
    assert record.read_text() == "not json"
    assert not (tmp_path / "report").exists()


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--cases=tokens-21"], "--record takes every case; leave out --cases"),
        (["--shard=1/2"], "--record takes every case; leave out --shard"),
        (["--draw=3"], "--record takes draws from 0 on; leave out --draw"),
    ],
)
def test_a_part_of_a_run_is_refused_as_the_record_of_all_of_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], complaint: str
) -> None:
    record = tmp_path / "results.json"
    assert gate(tmp_path, "--record", str(record), *arguments) == ExitCode.USAGE
    assert capsys.readouterr().err == f"loragate gate: {complaint}\n"
    assert not record.exists()
    assert not (tmp_path / "report").exists()


def test_an_interrupted_run_leaves_the_record_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(watch: Watch) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Watch, "wait", interrupted)
    record = tmp_path / "results.json"
    update_section(record, "gate", {"verdict": "pass"})
    assert gate(tmp_path, "--record", str(record)) == ExitCode.INCOMPLETE
    assert read_section(record, "gate") == {"verdict": "pass"}
    assert f"interrupted: {record} stays as it was" in capsys.readouterr().err


def test_a_run_without_a_plan_is_never_recorded_as_passed() -> None:
    assert outcome(summarize(EventLog(())))["verdict"] != "pass"


@pytest.mark.parametrize(
    ("visible", "expected"), [(None, 2), ("0", 1), ("GPU-b,0", 2), ("1,-1,0", 1)]
)
def test_a_record_says_how_many_gpus_the_run_had(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, expected: int
) -> None:
    listed = (ListedGpu("0", "GPU-a", 1 << 37), ListedGpu("1", "GPU-b", 1 << 37))
    machine = Machine("cuda", "NVIDIA H200", (9, 0), 132, 1 << 37)

    def on_a_gpu(selection: Selection) -> tuple[Plan, Mapping[str, Any]]:
        made, abilities = plan_selection(selection)
        return replace(made, machine=machine), abilities

    monkeypatch.setattr(opening, "plan_selection", on_a_gpu)
    monkeypatch.setattr(opening, "list_gpus", lambda environ: listed)
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    selection = Selection(matrix=(MATRIX,), subjects=("torch",), tier=Tier.SMOKE)
    request = opening.RunRequest(run="r", selection=selection, leg="gpu", legs=("gpu",))
    log = EventLog(tuple(opening.opening_events(request)))
    assert outcome(summarize(log))["gpus"] == expected


def test_a_record_names_the_code_that_the_run_began_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    states = iter([("abc", Tree.CLEAN), ("edited", Tree.DIRTY)])
    monkeypatch.setattr(recorder, "commit_and_tree", lambda root, *, ignoring: next(states))
    opened = recorder.Recorder.open(tmp_path / "results.json", "gate")
    opened.save(outcome(summarize(EventLog(()))))
    section = read_section(tmp_path / "results.json", "gate")
    assert section is not None
    assert (section["commit"], section["tree"]) == ("abc", "clean")
    assert "matrix" not in section
