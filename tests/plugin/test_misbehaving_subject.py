"""One session in which workers crash, hang and lose their device, and everything that it leaves."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from loragate.core.verdict import ExitCode, Failure, Verdict
from loragate.events.model import RunStarted

EXIT, SEGFAULT = 11, 12
HANG, LOST_DEVICE, ERROR, NO_MEMORY, WRONG = range(14, 19)
GOOD = range(21, 33)


@pytest.fixture(scope="module")
def session(run_once, run_session):
    def make(report):
        report.mkdir()
        (report / "events.jsonl").write_text('{"run": "earlier"}\n')
        workers = ("-n", "auto", "--maxprocesses", "2")
        return run_session(report, *workers, matrix="misbehaving.yaml", CUDA_VISIBLE_DEVICES="5,7")

    return run_once("misbehaving", make)


def test_every_case_that_does_not_misbehave_is_judged_and_passes(session):
    assert {session.of_tokens(tokens).verdict for tokens in GOOD} == {Verdict.PASS}


def test_every_expected_case_has_exactly_one_end(session):
    (plan,) = [event for event in session.log.events if isinstance(event, RunStarted)]
    expected = [name for row in plan.expected for name in row.run_ids]
    assert sorted(event.run_id for event in session.finished) == sorted(expected)
    assert len(expected) == len(GOOD) + 7


@pytest.mark.drill(
    tried="Cases that exit, crash, hang, lose the device, run out of memory and are wrong, at once",
    exit_code=ExitCode.WRONG,
    kept="the result of every other case; a kind, a place and a stack for each of these",
)
def test_the_session_exits_as_wrong_and_counts_what_it_judged(session, drill):
    # an exception of the subject is shown with its traceback
    drill(session.exit_code)
    assert "7 failed, 12 passed" in session.output
    assert "18 of 19 expected executed" in session.output


def test_a_worker_that_exits_is_a_crash_of_the_case_that_it_ran(session):
    assert session.of_tokens(EXIT).failure is Failure.CRASH
    assert re.match(r"worker gw\d died", session.of_tokens(EXIT).message)


def test_a_segfault_leaves_its_stack_in_the_report(session):
    crash = session.of_tokens(SEGFAULT)
    assert crash.failure is Failure.CRASH
    assert "Segmentation fault" in crash.message
    assert "in segfault" in crash.message


def test_a_case_that_hangs_with_the_gil_is_killed_at_its_own_deadline_with_its_stack(session):
    hang = session.of_tokens(HANG)
    assert (hang.verdict, hang.failure) == (Verdict.FAIL, Failure.HANG)
    assert hang.message.startswith("no end within 2 s")
    assert "in sleep_holding_the_gil" in hang.message
    # frames of pytest would only distract
    assert "/pluggy/" not in hang.message
    assert 2 <= hang.duration_s < 60


def test_the_report_of_a_dead_worker_names_the_cases_that_it_ran_before(session):
    dead = {session.of_tokens(t).worker: session.of_tokens(t) for t in (EXIT, SEGFAULT, HANG)}
    for worker, crash in dead.items():
        before = [e.run_id for e in session.finished if e.worker == worker and e is not crash]
        assert all(name in crash.message for name in before[-5:])


def test_a_lost_device_is_reported_once_by_its_case(session):
    lost = session.of_tokens(LOST_DEVICE)
    assert [j.failure for j in lost.judgements] == [Failure.CUDA_STICKY]
    assert "an illegal memory access" in lost.judgements[0].message
    assert "crashed while running" not in session.output


def test_a_worker_that_lost_its_device_runs_nothing_more(session):
    names = [
        event.run_id
        for event in session.finished
        if event.worker == session.of_tokens(LOST_DEVICE).worker
    ]
    assert names[-1] == session.of_tokens(LOST_DEVICE).run_id


def test_an_exception_of_the_subject_is_a_failure_with_its_traceback(session):
    (judgement,) = session.of_tokens(ERROR).judgements
    assert (judgement.verdict, judgement.failure) == (Verdict.FAIL, Failure.EXCEPTION)
    assert judgement.message.startswith("ZeroDivisionError: no kernel for this shape")
    assert "in raise_an_error" in judgement.message


def test_too_little_memory_is_neither_a_failure_of_the_kernel_nor_a_pass(session):
    (judgement,) = session.of_tokens(NO_MEMORY).judgements
    assert (judgement.verdict, judgement.failure) == (Verdict.INFRA, Failure.OUT_OF_MEMORY)


def test_a_wrong_answer_prints_its_place_and_the_command_that_replays_it(session):
    wrong = session.of_tokens(WRONG)
    assert wrong.judgements[0].failure is Failure.WRONG_ANSWER
    text = session.output[session.output.index(f"FAIL: {wrong.run_id}") :]
    assert re.search(r"slot -?\d+, token \d+, slice 0, column \d+", text)
    assert f"replay: {wrong.replay}\n" in text
    assert f" loragate replay {wrong.run_id} --draw 0 --matrix " in wrong.replay


def test_workers_are_pinned_to_the_devices_of_the_caller(session):
    gpus = {event.worker: event.gpu for event in session.finished}
    assert (gpus["gw0"], gpus["gw1"]) == ("5", "7")
    assert set(gpus.values()) == {"5", "7"}


def test_a_replacement_gets_the_device_of_the_worker_that_it_replaces(session):
    gpus = {event.worker: event.gpu for event in session.finished}
    replaced = re.findall(r"replacing crashed worker (gw\d+)", session.output)
    assert len(replaced) == 4
    for number, worker in enumerate(replaced, start=2):
        # the last replacement may find nothing left to run
        assert gpus.get(f"gw{number}", gpus[worker]) == gpus[worker]


def test_an_earlier_report_is_moved_aside_and_kept(session):
    kept = Path(session.report, "previous", "earlier", "events.jsonl")
    assert kept.read_text() == '{"run": "earlier"}\n'


def test_both_reports_hold_the_replay_command(session):
    wrong = session.of_tokens(WRONG).replay
    assert wrong in (session.report / "index.html").read_text()
    assert wrong in (session.report / "junit.xml").read_text()
