"""One session in which workers crash, hang and lose their device, looked at from all sides."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from loragate.core.verdict import Failure, Verdict
from loragate.events.model import RunStarted

EXIT, SEGFAULT = 11, 12
HANG, LOST_DEVICE, ERROR, NO_MEMORY, WRONG = range(14, 19)
GOOD = range(21, 33)


@pytest.fixture(scope="module")
def day(run_once, run_session):
    def make(report):
        report.mkdir()
        (report / "events.jsonl").write_text('{"run": "earlier"}\n')
        workers = ("-n", "auto", "--maxprocesses", "2")
        return run_session(report, *workers, matrix="bad_day.yaml", CUDA_VISIBLE_DEVICES="5,7")

    return run_once("bad_day", make)


def test_every_case_that_harms_nobody_is_judged_and_passes(day):
    assert {day.of_tokens(tokens).verdict for tokens in GOOD} == {Verdict.PASS}


def test_every_expected_case_has_exactly_one_end(day):
    (plan,) = [event for event in day.log.events if isinstance(event, RunStarted)]
    expected = [name for row in plan.expected for name in row.run_ids]
    assert sorted(event.run_id for event in day.finished) == sorted(expected)
    assert len(expected) == len(GOOD) + 7


def test_the_session_exits_as_wrong_and_counts_what_it_judged(day):
    assert day.exit_code == 1
    assert "7 failed, 12 passed" in day.output
    assert "18 of 19 expected executed" in day.output


def test_a_worker_that_exits_is_a_crash_of_the_case_that_it_ran(day):
    assert day.of_tokens(EXIT).failure is Failure.CRASH
    assert re.match(r"worker gw\d died", day.of_tokens(EXIT).message)


def test_a_segfault_leaves_its_stack_in_the_report(day):
    crash = day.of_tokens(SEGFAULT)
    assert crash.failure is Failure.CRASH
    assert "Segmentation fault" in crash.message
    assert "in segfault" in crash.message


def test_a_case_that_hangs_with_the_gil_is_killed_at_its_own_deadline_with_its_stack(day):
    hang = day.of_tokens(HANG)
    assert (hang.verdict, hang.failure) == (Verdict.FAIL, Failure.HANG)
    assert hang.message.startswith("no end within 2 s")
    assert "in sleep_holding_the_gil" in hang.message
    # where pytest itself stood says nothing
    assert "/pluggy/" not in hang.message
    assert 2 <= hang.duration_s < 60


def test_the_report_of_a_dead_worker_names_the_cases_that_it_ran_before(day):
    dead = {day.of_tokens(t).worker: day.of_tokens(t) for t in (EXIT, SEGFAULT, HANG)}
    for worker, obituary in dead.items():
        before = [e.run_id for e in day.finished if e.worker == worker and e is not obituary]
        assert all(name in obituary.message for name in before[-5:])


def test_a_lost_device_is_reported_by_its_case_and_echoed_by_nobody(day):
    lost = day.of_tokens(LOST_DEVICE)
    assert [j.failure for j in lost.judgements] == [Failure.CUDA_STICKY]
    assert "an illegal memory access" in lost.judgements[0].message
    assert "crashed while running" not in day.output


def test_a_worker_that_lost_its_device_runs_nothing_more(day):
    names = [
        event.run_id for event in day.finished if event.worker == day.of_tokens(LOST_DEVICE).worker
    ]
    assert names[-1] == day.of_tokens(LOST_DEVICE).run_id


def test_an_exception_of_the_subject_is_a_failure_with_its_traceback(day):
    (judgement,) = day.of_tokens(ERROR).judgements
    assert (judgement.verdict, judgement.failure) == (Verdict.FAIL, Failure.EXCEPTION)
    assert judgement.message.startswith("ZeroDivisionError: no kernel for this shape")
    assert "in raise_an_error" in judgement.message


def test_too_little_memory_is_neither_a_failure_of_the_kernel_nor_a_pass(day):
    (judgement,) = day.of_tokens(NO_MEMORY).judgements
    assert (judgement.verdict, judgement.failure) == (Verdict.INFRA, Failure.OUT_OF_MEMORY)


def test_a_wrong_answer_prints_its_place_and_the_command_that_replays_it(day):
    wrong = day.of_tokens(WRONG)
    assert wrong.judgements[0].failure is Failure.WRONG_ANSWER
    text = day.output[day.output.index(f"FAIL: {wrong.run_id}") :]
    assert re.search(r"slot -?\d+, token \d+, slice 0, column \d+", text)
    assert f"replay: loragate replay {wrong.run_id} --attempt 0" in text


def test_workers_are_pinned_to_the_devices_of_the_caller(day):
    gpus = {event.worker: event.gpu for event in day.finished}
    assert (gpus["gw0"], gpus["gw1"]) == ("5", "7")
    assert set(gpus.values()) == {"5", "7"}


def test_a_replacement_gets_the_device_of_the_worker_that_it_replaces(day):
    gpus = {event.worker: event.gpu for event in day.finished}
    replaced = re.findall(r"replacing crashed worker (gw\d+)", day.output)
    assert len(replaced) == 4
    for number, worker in enumerate(replaced, start=2):
        # the last replacement may find nothing left to run
        assert gpus.get(f"gw{number}", gpus[worker]) == gpus[worker]


def test_an_earlier_report_is_moved_aside_and_kept(day):
    kept = Path(day.report, "previous", "earlier", "events.jsonl")
    assert kept.read_text() == '{"run": "earlier"}\n'


def test_the_report_for_people_and_for_machines_is_written(day):
    wrong = day.of_tokens(WRONG).replay
    assert wrong in (day.report / "index.html").read_text()
    assert wrong in (day.report / "junit.xml").read_text()
