"""The real commands, on a package that looks like vLLM and has a listed defect, and more."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from loragate.core.verdict import ExitCode
from loragate.events.log import read_events
from loragate.inputs.mapping import BASE_ROW, make_token_slots
from loragate.matrix.ids import seed_of
from loragate.matrix.load import load_cases
from loragate.report.summary import summarize
from loragate.report.terminal import Colour, render_summary

pytestmark = pytest.mark.usefixtures("preloaded")

MATRIX = Path(__file__).parent / "listed.yaml"
# the last row has an adapter in one of them, and none in the other
SHOWS, HIDES = 4, 5


def session(tmp_path: Path, draw: int) -> list[str]:
    return [
        *("pytest", "cases", "-p", "no:cacheprovider", "-n", "0"),
        *("--loragate-subject=vllm", f"--loragate-matrix={MATRIX}"),
        *(f"--loragate-draw={draw}", f"--loragate-report={tmp_path / 'report'}"),
    ]


def test_the_last_row_has_an_adapter_in_one_of_the_draws_alone() -> None:
    (case,) = load_cases([MATRIX])
    last = [int(make_token_slots(case, seed_of(case, draw), 0)[-1]) for draw in (SHOWS, HIDES)]
    assert (last[0] != BASE_ROW, last[1] == BASE_ROW) == (True, True)


@pytest.mark.drill(
    tried="A listed defect that does not show with this draw",
    exit_code=ExitCode.OK,
    kept="the finding, as not seen; its rate allows that",
)
def test_a_listed_defect_that_a_draw_does_not_show_is_named_and_fails_nothing(
    drill: Any, run_in_checkout: Callable[..., Any], tmp_path: Path
) -> None:
    done = run_in_checkout(*session(tmp_path, HIDES), faults="last_row")
    drill(done.exit_code, done.output)
    log = read_events(tmp_path / "report" / "events.jsonl")
    assert (
        "NOT SEEN  finding last-row-is-lost: The last row gets no delta\n"
        "  listed: wrong_rows at most 1, rest_ratio at most 1\n"
        "  none of 1 draws shows it, which 5 of 10 draws allow\n"
    ) in render_summary(summarize(log), Colour.OFF)
    page = (tmp_path / "report" / "index.html").read_text(encoding="utf-8")
    assert "none of 1 draws shows it, which 5 of 10 draws allow; listed: wrong_rows at" in page


def test_a_listed_defect_that_shows_is_known(
    run_in_checkout: Callable[..., Any], tmp_path: Path
) -> None:
    done = run_in_checkout(*session(tmp_path, SHOWS), faults="last_row")
    assert done.exit_code == ExitCode.OK, done.output
    assert "1 xfailed" in done.output
    page = (tmp_path / "report" / "index.html").read_text(encoding="utf-8")
    assert "1 of 1 draws, first vllm.dense_delta." in page


def test_a_listed_defect_fails_the_test_and_the_run_if_pytest_is_to_excuse_nothing(
    run_in_checkout: Callable[..., Any], tmp_path: Path
) -> None:
    done = run_in_checkout(*session(tmp_path, SHOWS), "--runxfail", faults="last_row")
    assert "1 failed" in done.output
    assert done.exit_code == ExitCode.WRONG, done.output
    summary = summarize(read_events(tmp_path / "report" / "events.jsonl"))
    assert summary.exit_code is ExitCode.WRONG


@pytest.mark.drill(
    tried="A new defect in the case of a listed one, of the same kind and larger",
    exit_code=ExitCode.WRONG,
    kept="the failure, with what the finding lists and what it has",
)
def test_a_larger_error_than_the_listed_one_fails_and_says_what_it_exceeds(
    drill: Any, run_in_checkout: Callable[..., Any], tmp_path: Path
) -> None:
    done = run_in_checkout(*session(tmp_path, SHOWS), faults="last_row twice")
    drill(done.exit_code, done.output)
    assert "exceeds what finding last-row-is-lost lists: wrong_rows at most 1, not " in done.output
    assert "xfailed" not in done.output


@pytest.mark.drill(
    tried="A probe of a listed finding that kills its process",
    exit_code=ExitCode.INFRASTRUCTURE,
    kept="what every other probe observed; the line of this one says how it ended",
)
def test_a_probe_that_kills_its_process_costs_its_own_line_alone(
    drill: Any, run_in_checkout: Callable[..., Any]
) -> None:
    done = run_in_checkout("loragate", "findings", faults="crash")
    drill(done.exit_code, done.output)
    ended = "broken: its process was ended by SIGSEGV"
    assert f"broken       strided-input-refused: {ended}" in done.output
    # one that comes before it, and one that comes after it
    assert "unlisted     offset-start-ignored: absent: offset_start 0, then 32" in done.output
    assert "unlisted     split-k-unstable: not tried: needs a GPU" in done.output
    assert done.output.count("SIGSEGV") == 1
