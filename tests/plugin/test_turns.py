"""A case that is known to lose the device runs while no other case does."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from loragate.core.verdict import Failure, OracleName
from loragate.findings.ledger import Finding, Kind
from loragate.findings.pattern import CasePattern
from loragate.plugin import collection, memory, turns
from loragate.plugin.turns import DeviceTurns

WAIT_S = 20.0
# long enough for a thread that nothing holds up
SOON_S = 0.3
HOLDER = """
import sys, time
from pathlib import Path
from loragate.plugin.turns import DeviceTurns
with getattr(DeviceTurns(Path(sys.argv[1]), Path(sys.argv[1] + '.begun')), sys.argv[2])():
    print("within", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "gpu.lock"


def turns_of(path: Path) -> DeviceTurns:
    return DeviceTurns(path, path.with_name("session.begun"))


def entered(context: Callable[[], AbstractContextManager[None]]) -> threading.Event:
    """Set once another thread has been within."""
    was_within = threading.Event()

    def enter() -> None:
        with context():
            was_within.set()

    threading.Thread(target=enter, daemon=True).start()
    return was_within


def test_several_processes_may_use_the_device_at_once(path: Path) -> None:
    with turns_of(path).shares_device():
        assert entered(turns_of(path).shares_device).wait(WAIT_S)


@pytest.mark.parametrize("first", ["shares_device", "loses_device"])
def test_a_case_beside_others_and_one_that_loses_the_device_wait_for_each_other(
    path: Path, first: str
) -> None:
    second = {"shares_device": "loses_device", "loses_device": "shares_device"}[first]
    with getattr(turns_of(path), first)():
        waiting = entered(getattr(turns_of(path), second))
        assert not waiting.wait(SOON_S)
    assert waiting.wait(WAIT_S)


def test_two_that_lose_the_device_wait_for_each_other(path: Path) -> None:
    with turns_of(path).loses_device():
        waiting = entered(turns_of(path).loses_device)
        assert not waiting.wait(SOON_S)
    assert waiting.wait(WAIT_S)


def test_a_case_that_waits_for_the_device_alone_keeps_nobody_waiting(path: Path) -> None:
    with turns_of(path).shares_device():
        first = entered(turns_of(path).loses_device)
        assert not first.wait(SOON_S)
        assert entered(turns_of(path).shares_device).wait(WAIT_S)
        assert not first.wait(SOON_S)
    assert first.wait(WAIT_S)


def test_cases_wait_until_those_that_lose_the_device_have_begun(path: Path) -> None:
    own = turns_of(path)
    own.wait_first_for(2)
    waiting = entered(own.shares_device)
    with turns_of(path).loses_device():
        assert not waiting.wait(SOON_S)
    assert not waiting.wait(SOON_S), "one of two has not begun"
    # on another GPU of the same session
    with turns_of(path.with_name("other.lock")).loses_device():
        assert waiting.wait(WAIT_S)


def test_a_case_that_does_not_begin_is_not_waited_for_for_ever(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(turns, "_LONGEST_WAIT_S", SOON_S)
    own = turns_of(path)
    own.wait_first_for(1)
    first = entered(own.shares_device)
    assert not first.wait(SOON_S / 3)
    assert first.wait(WAIT_S)
    monkeypatch.setattr(turns, "_LONGEST_WAIT_S", 600.0)
    assert entered(own.shares_device).wait(WAIT_S), "nor a second time"


@pytest.mark.parametrize("held", ["shares_device", "loses_device"])
def test_the_turn_of_a_killed_process_is_over(
    path: Path, held: str, subject_environment: dict[str, str]
) -> None:
    command = [sys.executable, "-c", HOLDER, str(path), held]
    with subprocess.Popen(
        command, env=subject_environment, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "within\n"
        waiting = entered(turns_of(path).loses_device)
        had_to_wait = not waiting.wait(SOON_S)
        holder.kill()
        assert had_to_wait
        assert waiting.wait(WAIT_S)


WILD, CALM, OTHER = "vllm.dense_delta.wild", "vllm.dense_delta.calm", "vllm.dense_delta.other"
# of a subject that contains what the finding is about
FORK = "fork.dense_delta.wild"


def listed(run: str, *failures: Failure) -> Finding:
    return Finding(
        id="offset-overflows",
        subject="vllm",
        versions=">=0.26",
        kind=Kind.DEFECT,
        title="An offset overflows",
        statement="It is computed in 32 bits.",
        evidence="[0.0] where [1.0] is right",
        seen_on="0.26.0",
        case=CasePattern(run, OracleName.REFERENCE, failures),
        also=("fork",),
    )


LISTED = (
    listed(WILD, Failure.WRONG_ANSWER, Failure.CUDA_STICKY),
    listed(CALM, Failure.WRONG_ANSWER),
)


@pytest.mark.parametrize(
    ("run", "is_alone"), [(WILD, True), (FORK, True), (CALM, False), (OTHER, False)]
)
def test_a_case_that_is_listed_to_lose_the_device_has_it_for_itself(
    run: str, is_alone: bool, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "footprint_bytes", lambda case: 0)
    monkeypatch.setattr(memory, "case_run_of", lambda item: SimpleNamespace(run_id=run, case=None))
    own = SimpleNamespace(reserve=lambda size: nullcontext())
    stash = {memory.MEMORY: own, collection._FINDINGS: LISTED, memory.TURNS: turns_of(path)}
    item: Any = SimpleNamespace(config=SimpleNamespace(stash=stash))
    protocol = memory.pytest_runtest_protocol(item)
    next(protocol)
    others = entered(turns_of(path).shares_device)
    assert others.wait(SOON_S if is_alone else WAIT_S) != is_alone
    wild = entered(turns_of(path).loses_device)
    assert not wild.wait(SOON_S), "another one would lose the device below this one"
    with pytest.raises(StopIteration):
        protocol.send(True)
    assert others.wait(WAIT_S)
    assert wild.wait(WAIT_S)


def test_a_case_that_waits_for_the_device_alone_keeps_no_memory_from_others(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    has_memory = threading.Event()

    @contextmanager
    def reserve(size: int) -> Iterator[None]:
        has_memory.set()
        yield

    monkeypatch.setattr(memory, "footprint_bytes", lambda case: 0)
    monkeypatch.setattr(memory, "case_run_of", lambda item: SimpleNamespace(run_id=WILD, case=0))
    own = SimpleNamespace(reserve=reserve)
    stash = {memory.MEMORY: own, collection._FINDINGS: LISTED, memory.TURNS: turns_of(path)}
    item: Any = SimpleNamespace(config=SimpleNamespace(stash=stash))
    protocol = memory.pytest_runtest_protocol(item)
    with turns_of(path).shares_device():
        threading.Thread(target=next, args=(protocol,), daemon=True).start()
        assert not has_memory.wait(SOON_S)
    assert has_memory.wait(WAIT_S)


@pytest.mark.parametrize(
    ("runs", "workers", "awaited"),
    [
        ([WILD, CALM], 2, 1),
        ([WILD, FORK, OTHER], 3, 2),
        ([WILD, FORK], 2, 0),
        ([WILD, WILD], 4, 0),
        ([CALM], 2, 0),
    ],
)
def test_a_session_begins_with_its_cases_that_lose_the_device_if_workers_are_left(
    runs: list[str], workers: int, awaited: int, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "case_run_of", lambda item: item.run)
    own = turns_of(path)
    stash = {collection._FINDINGS: LISTED, memory.TURNS: own}
    config = SimpleNamespace(stash=stash, workerinput={"workercount": workers})
    session: Any = SimpleNamespace(
        config=config, items=[SimpleNamespace(run=SimpleNamespace(run_id=run)) for run in runs]
    )
    memory.pytest_collection_finish(session)
    assert own._first == awaited
    ordinary_test = SimpleNamespace(run=None)
    session.items.append(ordinary_test)
    memory.pytest_collection_finish(session)
    assert own._first == 0
