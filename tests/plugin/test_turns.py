"""Long kernels and cases that are known to lose the device keep out of each other's way."""

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
from loragate.events.model import KnownFinding
from loragate.execution import turns
from loragate.execution.turns import DeviceTurns
from loragate.findings.ledger import Finding, Kind
from loragate.findings.pattern import CasePattern
from loragate.plugin import memory

WAIT_S = 20.0
# long enough for a thread that nothing holds up
SOON_S = 0.3
HOLDER = """
import sys, time
from pathlib import Path
from loragate.execution.turns import DeviceTurns
with getattr(DeviceTurns(Path(sys.argv[1])), sys.argv[2])():
    print("within", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "gpu.lock"


def entered(context: Callable[[], AbstractContextManager[None]]) -> threading.Event:
    """Set once another thread has been within."""
    was_within = threading.Event()

    def enter() -> None:
        with context():
            was_within.set()

    threading.Thread(target=enter, daemon=True).start()
    return was_within


def test_several_processes_may_run_long_kernels_at_once(path: Path) -> None:
    with DeviceTurns(path).long_kernel():
        assert entered(DeviceTurns(path).long_kernel).wait(WAIT_S)


@pytest.mark.parametrize("first", ["long_kernel", "loses_device"])
def test_a_long_kernel_and_a_lost_device_wait_for_each_other(path: Path, first: str) -> None:
    second = {"long_kernel": "loses_device", "loses_device": "long_kernel"}[first]
    with getattr(DeviceTurns(path), first)():
        waiting = entered(getattr(DeviceTurns(path), second))
        assert not waiting.wait(SOON_S)
    assert waiting.wait(WAIT_S)


def test_two_that_lose_the_device_wait_for_each_other(path: Path) -> None:
    with DeviceTurns(path).loses_device():
        waiting = entered(DeviceTurns(path).loses_device)
        assert not waiting.wait(SOON_S)
    assert waiting.wait(WAIT_S)


def test_long_kernels_that_come_later_do_not_keep_others_waiting(path: Path) -> None:
    with DeviceTurns(path).long_kernel():
        first = entered(DeviceTurns(path).loses_device)
        assert not first.wait(SOON_S)
        later = entered(DeviceTurns(path).long_kernel)
        assert not later.wait(SOON_S)
    assert first.wait(WAIT_S)
    assert later.wait(WAIT_S)


@pytest.mark.parametrize("held", ["long_kernel", "loses_device"])
def test_the_turn_of_a_killed_process_is_over(
    path: Path, held: str, subject_environment: dict[str, str]
) -> None:
    command = [sys.executable, "-c", HOLDER, str(path), held]
    with subprocess.Popen(
        command, env=subject_environment, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "within\n"
        waiting = entered(DeviceTurns(path).loses_device)
        had_to_wait = not waiting.wait(SOON_S)
        holder.kill()
        assert had_to_wait
        assert waiting.wait(WAIT_S)


@pytest.fixture
def taken(path: Path) -> Iterator[DeviceTurns]:
    own = DeviceTurns(path)
    turns.take_turns(own)
    yield own
    turns.take_turns(None)


def test_a_process_that_shares_its_gpu_takes_the_turns_that_it_was_given(
    path: Path, taken: DeviceTurns
) -> None:
    with turns.long_kernel():
        assert not entered(DeviceTurns(path).loses_device).wait(SOON_S)
    with turns.loses_device():
        assert not entered(DeviceTurns(path).long_kernel).wait(SOON_S)


def test_a_case_that_loses_the_device_may_run_a_long_kernel_itself(
    path: Path, taken: DeviceTurns
) -> None:
    with turns.loses_device():
        # in a thread, which a wait for its own lock would not end
        nested = entered(turns.long_kernel)
        assert nested.wait(WAIT_S)
        assert not entered(DeviceTurns(path).long_kernel).wait(SOON_S)
    with turns.long_kernel():
        assert not entered(DeviceTurns(path).loses_device).wait(SOON_S)


def test_a_process_with_a_gpu_of_its_own_waits_for_nobody() -> None:
    with turns.loses_device(), turns.long_kernel(), turns.loses_device():
        pass


WILD, CALM, OTHER = "vllm.dense_delta.wild", "vllm.dense_delta.calm", "vllm.dense_delta.other"


def listed(run: str, *failures: Failure) -> KnownFinding:
    finding = Finding(
        id="offset-overflows",
        subject="vllm",
        versions=">=0.26",
        kind=Kind.DEFECT,
        title="An offset overflows",
        statement="It is computed in 32 bits.",
        evidence="[0.0] where [1.0] is right",
        seen_on="0.26.0",
        case=CasePattern(run, OracleName.REFERENCE, failures),
    )
    return KnownFinding(finding=finding, version="0.26.0")


LISTED = (
    listed(WILD, Failure.WRONG_ANSWER, Failure.CUDA_STICKY),
    listed(CALM, Failure.WRONG_ANSWER),
)


@pytest.mark.parametrize(("run", "is_alone"), [(WILD, True), (CALM, False), (OTHER, False)])
def test_a_case_that_is_listed_to_lose_the_device_has_it_for_itself(
    run: str, is_alone: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone: list[bool] = []

    @contextmanager
    def loses_device() -> Iterator[None]:
        alone.append(True)
        yield
        alone.append(False)

    monkeypatch.setattr(memory, "loses_device", loses_device)
    monkeypatch.setattr(memory, "footprint_bytes", lambda case: 0)
    monkeypatch.setattr(memory, "case_run_of", lambda item: SimpleNamespace(run_id=run, case=None))
    shared = SimpleNamespace(reserve=lambda size: nullcontext())
    stash = {memory.MEMORY: shared, memory._LISTED: LISTED}
    item: Any = SimpleNamespace(config=SimpleNamespace(stash=stash))
    protocol = memory.pytest_runtest_protocol(item)
    next(protocol)
    assert alone == ([True] if is_alone else [])
    with pytest.raises(StopIteration):
        protocol.send(True)
    assert alone == ([True, False] if is_alone else [])
