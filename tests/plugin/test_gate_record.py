"""The record of a gate run in a results file."""

from __future__ import annotations

from pathlib import Path

import pytest

from loragate.cli import main
from loragate.recording import outcome, section_of
from loragate.report.log import EventLog
from loragate.report.summary import summarize
from loragate.results import read_section

CASE = "torch.dense_delta.*.in-1.*"


def gate(tmp_path: Path, *arguments: str) -> int:
    report = str(tmp_path / "report")
    return main(["gate", "--subject=torch", f"--cases={CASE}", f"--report={report}", *arguments])


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


def test_a_scan_over_seeds_does_not_replace_the_plain_run() -> None:
    assert {section_of(1), section_of(20)} == {"gate", "gate_seeds"}


def test_a_file_that_cannot_be_added_to_is_refused_before_anything_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = tmp_path / "results.json"
    record.write_text("not json")
    assert gate(tmp_path, "--record", str(record)) == 4
    assert str(record) in capsys.readouterr().err
    assert record.read_text() == "not json"
    assert not (tmp_path / "report").exists()


def test_a_run_without_a_plan_is_never_recorded_as_passed() -> None:
    assert outcome(summarize(EventLog(())))["verdict"] != "pass"
