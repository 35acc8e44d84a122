"""A run in a step of GitHub Actions: one page is appended, and none of it changes the run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from loragate.core.verdict import ExitCode

_LIMIT = 1024 * 1024
_EARLIER = "an earlier command of this step\n"


def test_a_session_of_one_case_has_one_worker_and_appends_its_page_once(
    tmp_path: Path, run_session: Callable
) -> None:
    page, report = tmp_path / "summary.md", tmp_path / "report"
    page.write_text(_EARLIER)
    summary = {"GITHUB_STEP_SUMMARY": str(page)}
    session = run_session(report, "-n", "auto", matrix="one_good.yaml", **summary)
    assert session.exit_code == ExitCode.OK, session.output
    # a worker takes seconds to start, whatever the number of cores
    assert "created: 1/1 worker" in session.output
    text = page.read_text()
    assert text.startswith(f"{_EARLIER}\n\n## loragate: PASS in ")
    assert text.count("## loragate") == 1
    assert f"\nReport: ` {report} `\n" in text


@pytest.mark.drill(
    tried="A full step-summary file of GitHub Actions",
    exit_code=ExitCode.OK,
    kept="verdict, terminal summary and report; a line on stderr says what is missing",
)
def test_a_full_step_summary_changes_nothing_else(
    drill, tmp_path: Path, run_gate: Callable
) -> None:
    page, report = tmp_path / "summary.md", tmp_path / "report"
    page.write_bytes(b"x" * _LIMIT)
    gate = run_gate(
        report, "--subject=torch", matrix="one_good.yaml", GITHUB_STEP_SUMMARY=str(page)
    )
    drill(gate.exit_code, gate.output)
    assert page.read_bytes() == b"x" * _LIMIT
    _check_rest(gate.output, report, page, "it already holds 1048576 of 1048576 bytes")


@pytest.mark.drill(
    tried="A step summary on a full disk",
    exit_code=ExitCode.OK,
    kept="verdict, terminal summary and report; a line on stderr says what is missing",
)
def test_a_step_summary_on_a_full_disk_changes_nothing_else(
    drill, tmp_path: Path, run_session: Callable
) -> None:
    report = tmp_path / "report"
    session = run_session(
        report, "-n", "0", matrix="one_good.yaml", GITHUB_STEP_SUMMARY="/dev/full"
    )
    drill(session.exit_code, session.output)
    _check_rest(session.output, report, Path("/dev/full"), "No space left on device")


def _check_rest(output: str, report: Path, page: Path, problem: str) -> None:
    # pytest's own progress may stand before it on the line
    assert output.count(f"GITHUB_STEP_SUMMARY: {page}: no page was added: {problem}\n") == 1, output
    assert "\nPASS in " in output
    assert (report / "junit.xml").exists()
    assert (report / "index.html").exists()
