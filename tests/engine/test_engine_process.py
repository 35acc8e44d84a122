"""An engine in a process of its own: what it returns, and what becomes of one that fails."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import psutil
import pytest
import torch

from loragate.core.machine import Machine
from loragate.engine import evidence, process
from loragate.engine.order import EngineOrder
from loragate.engine.process import EngineError, EngineNotStarted, EngineProcess
from loragate.engine.requests import Completion, EngineCounts, Request
from loragate.matrix.case import Case, Dtype, Site
from loragate.matrix.engine_case import Requests

from .small_order import ORDER

ENGINES = '''
import itertools
import os
import subprocess
import sys
import time
from loragate.engine.requests import Completion, EngineCounts


class Echo:
    """Says the prompt again, and has started another process."""

    def __init__(self, order):
        print("max_length", order.max_length)
        self.names = []
        self.other = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"])

    def load(self, name, folder):
        self.names.append(name)

    def unload(self, name):
        self.names.remove(name)

    def generate(self, requests):
        if requests and requests[0].adapter == "missing":
            raise KeyError("missing")
        if requests and requests[0].adapter == "crash":
            os._exit(7)
        if requests and requests[0].adapter == "crash beside a fork":
            if os.fork() == 0:
                time.sleep(600)
            os._exit(8)
        if requests and requests[0].adapter == "leave":
            os.closerange(3, 256)
        while requests and requests[0].adapter in ("hang", "leave"):
            time.sleep(0.1)
        return [Completion(request.prompt) for request in requests]

    def counts(self):
        return EngineCounts(len(self.names), self.other.pid, None, None)

    def close(self):
        pass


class Showing(Echo):
    def trace(self, tokens, adapter):
        import torch

        return {"lm_head": torch.tensor([list(tokens)], dtype=torch.bfloat16)}


class Lost(Echo):
    """Cannot show its modules."""

    def trace(self, tokens, adapter):
        if adapter == "crash":
            os._exit(7)
        time.sleep(600)


def broken(order):
    raise RuntimeError("no memory for a cache")
'''
Start = Callable[..., EngineProcess]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Start:
    (tmp_path / "engines_of_a_test.py").write_text(ENGINES)
    monkeypatch.syspath_prepend(str(tmp_path))

    def started(name: str, *, deadline_s: float = 240.0) -> EngineProcess:
        target, log = f"engines_of_a_test:{name}", tmp_path / "engine.log"
        return EngineProcess(target, ORDER, deadline_s=deadline_s, log=log)

    return started


def other_of(engine: EngineProcess) -> psutil.Process:
    pid = engine.counts().drafts_rejected
    assert pid is not None
    return psutil.Process(pid)


def is_gone(process: psutil.Process) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


def wait_for_end(process: psutil.Process) -> None:
    # killed, but perhaps not yet collected by its new parent
    end = time.monotonic() + 240
    while not is_gone(process):
        assert time.monotonic() < end, "the engine left a process behind"
        time.sleep(0.01)


def test_a_process_answers_as_its_engine_and_leaves_nothing_behind(start: Start) -> None:
    with start("Echo") as engine:
        engine.load("one", Path("folder"))
        engine.load("two", Path("folder"))
        engine.unload("one")
        requests = [Request((1, 2), None, 1), Request((3,), "two", 1)]
        assert engine.generate(requests) == [Completion((1, 2)), Completion((3,))]
        assert engine.counts() == EngineCounts(1, other_of(engine).pid, None, None)
        assert "max_length 12" in engine.log_tail()
        other = other_of(engine)
    wait_for_end(other)


def test_an_engine_shows_its_modules_to_another_process_if_it_can(start: Start) -> None:
    with start("Showing") as engine:
        shown = engine.trace([1, 2, 3], None)
    # kept when the process is gone
    assert shown["lm_head"].tolist() == [[1.0, 2.0, 3.0]]
    assert shown["lm_head"].dtype is torch.float64
    with start("Echo") as engine:
        assert engine.trace([1], None) == {}


def test_a_start_that_fails_says_what_the_engine_said(start: Start) -> None:
    with pytest.raises(EngineNotStarted, match=r"(?s)did not start.*no memory for a cache"):
        start("broken")
    with pytest.raises(EngineNotStarted, match="the start did not end before the deadline"):
        start("Echo", deadline_s=0.0)


@pytest.mark.parametrize(
    ("adapter", "message"),
    [
        # of the traceback the frames of the engine alone
        (
            "missing",
            r"(?s)^generate raised KeyError: 'missing'\n.*\n"
            r"Traceback \(most recent call last\):\n  File \S+engines_of_a_test.py",
        ),
        ("crash", "ended with 7 in generate"),
        # which keeps the channel open
        ("crash beside a fork", "ended with 8 in generate"),
    ],
)
def test_a_call_that_fails_ends_the_engine_with_its_processes(
    start: Start, adapter: str, message: str
) -> None:
    engine = start("Echo")
    other = other_of(engine)
    with pytest.raises(EngineError, match=message) as caught, engine:
        engine.generate([Request((1,), adapter, 1)])
    assert "max_length 12" in str(caught.value)
    assert not isinstance(caught.value, EngineNotStarted)
    wait_for_end(other)


def test_a_call_beyond_the_deadline_ends_the_engine_with_its_processes(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = start("Echo")
    other = other_of(engine)
    monkeypatch.setattr(engine, "_left_s", 0.2)
    with pytest.raises(EngineError, match="generate did not end before the deadline"), engine:
        engine.generate([Request((1,), "hang", 1)])
    wait_for_end(other)


@pytest.mark.parametrize(
    ("adapter", "message"),
    [("crash", "ended with 7 in trace"), ("hang", "trace did not end before the deadline")],
)
def test_a_caller_that_goes_on_without_an_answer_is_not_told_so_again_when_it_closes(
    start: Start, monkeypatch: pytest.MonkeyPatch, adapter: str, message: str
) -> None:
    with start("Lost") as engine:
        other = other_of(engine)
        monkeypatch.setattr(engine, "_left_s", 20.0 if adapter == "crash" else 0.2)
        with pytest.raises(EngineError, match=message):
            engine.trace([1], adapter)
        # whatever is left of the deadline
        wait_for_end(other)
        with pytest.raises(EngineError, match="was ended before counts"):
            engine.counts()


def test_the_time_between_calls_is_not_that_of_the_engine(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr(process, "monotonic", lambda: now)
    with start("Echo", deadline_s=200.0) as engine:
        now += 1000.0
        assert engine.generate([Request((1,), None, 1)]) == [Completion((1,))]
        now += 1000.0


def test_the_calls_of_an_engine_share_one_deadline(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    ticks = itertools.count(step=60.0)
    monkeypatch.setattr(process, "monotonic", lambda: next(ticks))
    engine = start("Echo", deadline_s=150.0)
    other = other_of(engine)
    assert engine.counts().drafts_accepted == 0
    with pytest.raises(EngineError, match="generate did not end before the deadline"), engine:
        engine.generate([Request((1,), "hang", 1)])
    wait_for_end(other)


def test_a_deadline_is_one_of_true_time_however_fast_the_clocks_of_python_run(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    true = time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: 1e6 * true())
    with start("Echo") as engine:
        assert engine.counts().drafts_accepted == 0


def test_an_engine_that_closes_its_channel_and_stays_is_ended(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = start("Echo")
    other = other_of(engine)
    monkeypatch.setattr(process, "_TO_END_S", 0.1)
    with pytest.raises(EngineError, match="closed its channel and did not end"), engine:
        engine.generate([Request((1,), "leave", 1)])
    wait_for_end(other)


@pytest.mark.parametrize(("requests", "share"), [(Requests.TOGETHER, 1), (Requests.QUEUED, 2)])
def test_an_engine_may_run_all_requests_of_a_batch_at_a_time_or_half_of_them(
    monkeypatch: pytest.MonkeyPatch, requests: Requests, share: int
) -> None:
    orders = []

    def start(target: str, order: EngineOrder, **options: object) -> NoReturn:
        orders.append(order)
        raise EngineNotStarted("noted")

    monkeypatch.setattr(evidence, "EngineProcess", start)
    case = Case(site=Site.ENGINE, rank=8, slots=3, dtype=Dtype.FP32, requests=requests)
    with pytest.raises(EngineNotStarted):
        evidence.collect("module:Engine", case, Machine("cpu", "", None, 1, 0), seed=1)
    # the base model, three adapters, and another prompt of the last one
    assert [order.max_requests for order in orders] == [5 // share]
