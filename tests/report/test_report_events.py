"""Writing events down and reading them back."""

from __future__ import annotations

import json
import math
import os
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from loragate.core.verdict import Failure, Judgement, OracleName, Verdict
from loragate.events.log import (
    Durability,
    EventLog,
    EventsError,
    EventTail,
    EventWriter,
    encode,
    read_events,
)
from loragate.events.model import (
    SCHEMA,
    CaseFinished,
    CaseStarted,
    Event,
    Expected,
    KnownFinding,
    Note,
    RunStarted,
)
from loragate.findings.ledger import CasePattern, Finding
from loragate.matrix.case import Tier
from loragate.report.summary import summarize

_NUMBERS = st.floats(allow_nan=False)
_WORDS = st.text(max_size=30)


@st.composite
def _judgements(draw: st.DrawFn) -> Judgement:
    verdict = draw(st.sampled_from(Verdict))
    needs_kind = verdict in (Verdict.FAIL, Verdict.INFRA)
    return Judgement(
        oracle=draw(st.sampled_from(OracleName)),
        verdict=verdict,
        failure=draw(st.sampled_from(Failure)) if needs_kind else None,
        message=draw(_WORDS),
        metrics=draw(st.dictionaries(_WORDS, _NUMBERS, max_size=3)),
        where=draw(st.dictionaries(_WORDS, st.integers() | _WORDS, max_size=3)),
    )


@st.composite
def _plans(draw: st.DrawFn) -> RunStarted:
    run_ids = tuple(draw(st.lists(_WORDS, unique=True, min_size=1, max_size=4)))
    row = Expected(leg="l", subject="s", site="t", count=len(run_ids), run_ids=run_ids)
    kinds = st.builds(
        RunStarted,
        run=_WORDS,
        started_at=_WORDS,
        tier=st.sampled_from(Tier),
        subjects=st.just(("s",)),
        legs=st.just(("l",)),
        expected=st.just((row,)),
    )
    return draw(kinds)


_BUILT = (RunStarted, CaseFinished, KnownFinding)
# a verdict of a case is free here: what contradicts its evidence is for the summary to judge
_EVENTS = st.one_of(
    _plans(),
    st.builds(CaseFinished, judgements=st.lists(_judgements(), max_size=3).map(tuple)),
    # an entry has either a probe or a case, and those of a run have a case
    st.builds(
        KnownFinding, finding=st.builds(Finding, probe=st.none(), case=st.builds(CasePattern))
    ),
    *(st.from_type(kind) for kind in get_args(Event) if kind not in _BUILT),
)


def _holds(event: Event) -> bool:
    return "nan" not in repr(event)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(events=st.lists(_EVENTS.filter(_holds), max_size=6))
def test_every_event_survives_being_written_and_read(tmp_path: Path, events: list[Event]) -> None:
    path = tmp_path / "events.jsonl"
    path.unlink(missing_ok=True)
    with EventWriter(path, run="r") as writer:
        for event in events:
            writer.write(event)
    assert read_events(path) == EventLog(tuple(events))


def test_figures_that_are_not_finite_are_written_as_strict_json() -> None:
    metrics = {"error": math.inf, "least": -math.inf, "other": math.nan}
    event = _finished_with(Judgement(OracleName.EXACT, Verdict.PASS, metrics=metrics))
    written = json.loads(encode(event, run="r"), parse_constant=pytest.fail)
    found = written["event"]["judgements"][0]["metrics"]
    assert found == {"error": "Infinity", "least": "-Infinity", "other": "NaN"}


@pytest.mark.parametrize(
    ("text", "value"),
    [("inf", math.inf), ("-inf", -math.inf), ("Infinity", math.inf), ("1.5", 1.5)],
)
def test_a_figure_that_was_written_as_text_is_read_as_a_number(
    tmp_path: Path, text: str, value: float
) -> None:
    event = _finished_with(Judgement(OracleName.EXACT, Verdict.PASS, metrics={"error": 0.25}))
    line = encode(event, run="r").replace("0.25", f'"{text}"')
    (read,) = read_events(_file(tmp_path, line)).events
    assert isinstance(read, CaseFinished)
    assert read.judgements[0].metrics == {"error": value}


def test_text_that_utf8_cannot_hold_does_not_cost_the_record(tmp_path: Path) -> None:
    judgement = Judgement(OracleName.EXACT, Verdict.PASS, metrics={"error": math.inf})
    event = replace(_finished_with(judgement), message="byte \udc80 of a log")
    path = tmp_path / "events.jsonl"
    with EventWriter(path, run="r") as writer:
        writer.write(event)
    assert read_events(path).events == (replace(event, message="byte ? of a log"),)


@pytest.mark.parametrize("end", ["\x85", "\u2028", "\u2029", "\x0b", "\x0c", "\x1c", "\r", "\n"])
def test_a_message_may_hold_any_end_of_a_line(tmp_path: Path, end: str) -> None:
    event = replace(_finished_with(Judgement(OracleName.EXACT, Verdict.PASS)), message=f"a{end}b")
    path = tmp_path / "events.jsonl"
    with EventWriter(path, run="r") as writer:
        writer.write(event)
    assert read_events(path) == EventLog((event,))


def test_figures_that_are_not_finite_are_read_as_numbers_again(tmp_path: Path) -> None:
    metrics = {"error": math.inf, "other": math.nan}
    event = _finished_with(Judgement(OracleName.EXACT, Verdict.PASS, metrics=metrics))
    (read,) = read_events(_file(tmp_path, encode(event, run="r"))).events
    assert isinstance(read, CaseFinished)
    assert read.judgements[0].metrics["error"] == math.inf
    assert math.isnan(read.judgements[0].metrics["other"])


def test_scalars_of_numpy_and_torch_are_written_as_plain_numbers() -> None:
    numpy, torch = pytest.importorskip("numpy"), pytest.importorskip("torch")
    metrics = {"a": numpy.float32(0.5), "b": torch.tensor(2.5), "c": numpy.int64(3)}
    metrics |= {"d": torch.tensor(math.inf)}
    judgement = Judgement(
        OracleName.EXACT, Verdict.PASS, metrics=metrics, where={"slot": numpy.int64(7)}
    )
    written = json.loads(encode(_finished_with(judgement), run="r"))["event"]["judgements"][0]
    assert written["metrics"] == {"a": 0.5, "b": 2.5, "c": 3, "d": "Infinity"}
    assert written["where"] == {"slot": 7}


def test_a_record_is_one_line_that_names_its_schema_kind_and_run() -> None:
    line = encode(CaseStarted(run_id="a", worker="gw0", draw=0, seed=2**62), run="r")
    assert line == (
        '{"schema":2,"kind":"case_started","run":"r",'
        '"event":{"run_id":"a","worker":"gw0","draw":0,"seed":4611686018427387904,'
        '"repeat":0,"replay":""}}'
    )


def test_a_line_torn_by_a_kill_is_counted_and_costs_no_other(tmp_path: Path) -> None:
    whole = encode(Note(text="first"), run="r").encode()
    path = tmp_path / "events.jsonl"
    # the kill may cut a character in two
    path.write_bytes(whole + b"\n" + whole.replace(b"first", "caf\u00e9".encode())[:22] + b"\xc3")
    assert read_events(path) == EventLog((Note(text="first"),), damaged=1)


def test_a_writer_does_not_continue_the_torn_line_of_a_killed_one(tmp_path: Path) -> None:
    path = _file(tmp_path, encode(Note(text="torn"), run="r")[:20], end="")
    with EventWriter(path, run="r", durability=Durability.SYNCED) as writer:
        writer.write(Note(text="whole"))
    assert read_events(path) == EventLog((Note(text="whole"),), damaged=1)


def test_a_record_that_the_system_takes_in_pieces_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[:7]))
    path = tmp_path / "events.jsonl"
    with EventWriter(path, run="r") as writer:
        writer.write(Note(text="whole"))
        writer.write(Note(text="whole, too"))
    assert read_events(path) == EventLog((Note(text="whole"), Note(text="whole, too")))


def test_lines_of_several_writers_do_not_interleave(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"

    def write_some(name: str) -> None:
        with EventWriter(path, run="r") as writer:
            for number in range(50):
                writer.write(Note(text=f"{name}{number}" * 400))

    threads = [threading.Thread(target=write_some, args=(name,)) for name in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    log = read_events(path)
    assert (len(set(log.events)), log.damaged) == (200, 0)


_SCHEMA_1 = """
{"event":{"attempts":[0,3],"commit":"","expected":[{"count":1,"leg":"x","run_ids":["s.t.rank-8"],\
"site":"t","subject":"s"}],"legs":["x"],"machine":{},"run":"r","skipped":[],"started_at":"",\
"subjects":["s"],"tier":"smoke","tree":"clean","versions":{}},"kind":"run_started","run":"r",\
"schema":1}
{"event":{"attempt":3,"run_id":"s.t.rank-8","seed":5,"worker":"gw0"},"kind":"case_started",\
"run":"r","schema":1}
{"event":{"attempt":3,"duration_s":0.5,"failure":null,"gpu":"","judgements":[{"failure":\
"wrong_answer","message":"no","metrics":{"err":"inf","ratio":"nan"},"oracle":"exact","verdict":\
"fail","where":{"slot":-1}}],"message":"","replay":"loragate replay s.t.rank-8 --attempt 3",\
"run_id":"s.t.rank-8","seed":5,"site":"t","subject":"s","verdict":"fail","worker":"gw0"},\
"kind":"case_finished","run":"r","schema":1}
""".replace("\\\n", "")


def test_a_record_of_schema_1_is_read_with_its_attempts_as_draws(tmp_path: Path) -> None:
    log = read_events(_file(tmp_path, *_SCHEMA_1.strip().splitlines()))
    assert (log.damaged, log.unknown) == (0, 0)
    plan, start, end = log.events
    assert isinstance(plan, RunStarted)
    assert isinstance(start, CaseStarted)
    assert isinstance(end, CaseFinished)
    assert (plan.draws, plan.repeats) == ((0, 3), 1)
    assert start.trial == end.trial == (3, 0)
    assert end.replay == "loragate replay s.t.rank-8 --draw 3"
    metrics = end.judgements[0].metrics
    assert metrics["err"] == math.inf
    assert math.isnan(metrics["ratio"])


def test_a_run_of_schema_1_is_judged_draw_by_draw(tmp_path: Path) -> None:
    summary = summarize(read_events(_file(tmp_path, *_SCHEMA_1.strip().splitlines())))
    assert [(outcome.draw, outcome.verdict) for outcome in summary.draws] == [
        (0, Verdict.INCONCLUSIVE),
        (3, Verdict.FAIL),
    ]
    assert summary.reasons[0] == "1 case wrong, in draw 3"


def test_a_record_with_fewer_fields_is_still_read(tmp_path: Path) -> None:
    event = {"run_id": "a", "subject": "s", "site": "t", "draw": 0, "seed": 1, "worker": "w"}
    event |= {"verdict": "pass", "judgements": [], "duration_s": 1.0, "replay": "x"}
    record = {"schema": SCHEMA, "kind": "case_finished", "run": "r", "event": event}
    (read,) = read_events(_file(tmp_path, json.dumps(record))).events
    assert isinstance(read, CaseFinished)
    assert (read.run_id, read.repeat, read.gpu, read.failure) == ("a", 0, "", None)


def test_a_record_of_a_newer_schema_is_refused_with_file_and_line(tmp_path: Path) -> None:
    newer = json.dumps({"schema": SCHEMA + 1, "kind": "note", "run": "r", "event": {"text": "x"}})
    path = _file(tmp_path, encode(Note(text="fine"), run="r"), newer)
    with pytest.raises(EventsError, match=r"events\.jsonl:2: schema 3 is newer than 2"):
        read_events(path)


def test_a_missing_file_of_events_is_a_user_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(EventsError, match=r"nowhere\.jsonl: cannot read events: No such file"):
        read_events(tmp_path / "nowhere.jsonl")


def test_an_unknown_kind_is_left_out_and_counted(tmp_path: Path) -> None:
    unknown = json.dumps({"schema": 1, "kind": "clock_drift", "run": "r", "event": {}})
    path = _file(tmp_path, unknown, encode(Note(text="x"), run="r"))
    assert read_events(path) == EventLog((Note(text="x"),), unknown=1)


@pytest.mark.parametrize(
    "line",
    [
        "[]",
        "null",
        "[" * 100_000,
        '{"schema":1,"kind":"note","run":"r"}',
        '{"schema":1,"kind":"note","run":"r","event":{}}',
        '{"schema":1,"kind":"leg_started","run":"r","event":{"name":{"a":1}}}',
    ],
)
def test_a_record_that_is_not_what_its_kind_requires_is_damaged(tmp_path: Path, line: str) -> None:
    path = _file(tmp_path, line, encode(Note(text="x"), run="r"))
    assert read_events(path) == EventLog((Note(text="x"),), damaged=1)


def test_records_that_another_run_left_behind_do_not_count(
    tmp_path: Path, plan: Callable[..., RunStarted]
) -> None:
    ours = plan("mine.a")
    stale = encode(_finished_with(), run="yesterday")
    path = _file(tmp_path, stale, encode(ours, run=ours.run))
    assert read_events(path) == EventLog((ours,), foreign=1)


def test_a_tail_returns_every_event_once_and_only_when_its_line_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    tail = EventTail(path, run="r")
    assert tail.poll() == ()
    first, second = (encode(Note(text=text), run="r") for text in ("first", "second"))
    path.write_text(f"{first}\n{second[:10]}")
    assert tail.poll() == (Note(text="first"),)
    path.write_text(f"{first}\n{second}\n{encode(Note(text='x'), run='other')}\n")
    assert tail.poll() == (Note(text="second"),)
    assert tail.poll() == ()


def _file(folder: Path, *lines: str, name: str = "events.jsonl", end: str = "\n") -> Path:
    path = folder / name
    path.write_text("\n".join(lines) + end, encoding="utf-8")
    return path


def _finished_with(*judgements: Judgement) -> CaseFinished:
    known: dict[str, Any] = {"run_id": "a", "subject": "s", "site": "t", "draw": 0, "seed": 1}
    known |= {"worker": "w", "verdict": Verdict.PASS, "duration_s": 1.0, "replay": "x"}
    return CaseFinished(judgements=judgements, **known)
