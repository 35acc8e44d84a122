"""These tests are about host logic and small numbers: they run in Triton's interpreter even on a
machine with a GPU. The switch must be set before lorakernels is imported."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest
import torch

os.environ["TRITON_INTERPRET"] = "1"

from ..watched import stacked, watched_kernels  # noqa: F401


@pytest.fixture
def run_compiled() -> Callable[[str], None]:
    """Runs a script in a process of its own, where kernels are compiled for the GPU."""

    def run(script: str) -> None:
        compiled = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
        command = (sys.executable, "-c", script)
        done = subprocess.run(command, env=compiled, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr

    return run


class RecordedStream:
    """A stream that runs everything at once and notes who waits for what."""

    def __init__(self, owner: RecordedStreams, name: str) -> None:
        self.owner, self.name = owner, name

    def wait_event(self, event: RecordedEvent) -> None:
        self.owner.log.append(f"{self.name} waits {event.name}")


class RecordedEvent:
    def __init__(self, owner: RecordedStreams) -> None:
        self.owner, self.name = owner, f"event{owner.num_events}"
        owner.num_events += 1

    def record(self, stream: RecordedStream) -> None:
        self.owner.log.append(f"{stream.name} records {self.name}")


class RecordedStreams:
    """What lorakernels uses of torch.cuda, for devices without streams. `drawn` are streams that
    are handed out before new ones."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.num_events = self.num_streams = 0
        self.capturing = False
        self.main = RecordedStream(self, "main")
        self.current = self.main
        self.drawn: list[RecordedStream] = []
        self.priorities: list[int] = []

    def Stream(self, device: torch.device, priority: int) -> RecordedStream:
        self.priorities.append(priority)
        if self.drawn:
            return self.drawn.pop(0)
        self.num_streams += 1
        return RecordedStream(self, f"side{self.num_streams}")

    def Event(self) -> RecordedEvent:
        return RecordedEvent(self)

    def current_stream(self, device: torch.device) -> RecordedStream:
        return self.current

    def device(self, device: torch.device) -> AbstractContextManager[None]:
        return nullcontext()

    @contextmanager
    def stream(self, stream: RecordedStream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def is_current_stream_capturing(self) -> bool:
        return self.capturing

    def note(self, work: str) -> None:
        """Work on the current stream."""
        self.log.append(f"{self.current.name} runs {work}")

    def noting(self, name: str, work: Callable[..., Any]) -> Callable[..., Any]:
        """The same work, which is noted under a name before it is done."""

        def run(*args: Any, **options: Any) -> Any:
            self.note(name)
            return work(*args, **options)

        return run


@pytest.fixture(autouse=True)
def new_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """No launch is found that another test prepared, which may have changed what it calls."""
    from lorakernels.runtime import prepared

    monkeypatch.setattr(prepared, "_PREPARED", {})


@pytest.fixture
def new_plans() -> Iterator[None]:
    """No plan of a linear layer is found that was made before, or afterwards one that is made now:
    for tests that change what the plans call."""
    from lorakernels.dense import expand_plan, plan, sizes

    planned = plan.plan_shrink, expand_plan.plan_expand, sizes.plan_shrunk
    remembered = (*planned, plan.tile_programs)
    for each in remembered:
        each.cache_clear()
    yield
    for each in remembered:
        each.cache_clear()


@pytest.fixture
def recorded_streams(monkeypatch: pytest.MonkeyPatch) -> RecordedStreams:
    """Gives every device streams that are recorded."""
    from lorakernels.runtime import streams

    recorded = RecordedStreams()
    monkeypatch.setattr(streams, "stream_module", lambda device: recorded)
    return recorded


@pytest.fixture
def noted(recorded_streams: RecordedStreams, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What runs on which stream, the launches of a MoE layer among it."""
    from lorakernels.moe.align import ops as align
    from lorakernels.moe.layer import launch, ops

    noting, multiply = recorded_streams.noting, launch.launch_gemm
    names = {"WHOLE": "product", "SUMS": "sums", "REST": "rest"}

    def product(*args: Any, part: Any = launch._Part.WHOLE, **options: Any) -> None:
        recorded_streams.note(names[part.name])
        multiply(*args, part=part, **options)

    monkeypatch.setattr(launch, "launch_gemm", product)
    monkeypatch.setattr(launch, "shrink", noting("shrink", launch.shrink))
    monkeypatch.setattr(ops, "launch_sum", noting("sum", ops.launch_sum))
    monkeypatch.setattr(ops, "quantise_rows", noting("quantise", ops.quantise_rows))
    monkeypatch.setattr(align, "fill_tables", noting("align", align.fill_tables))
    return recorded_streams.log


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def noted_linear(recorded_streams: RecordedStreams, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What runs on which stream, the launches of a linear layer among it."""
    from torch.nn import functional

    from lorakernels.dense import linear as operator

    noting = recorded_streams.noting

    class Functions:
        linear = staticmethod(noting("base", functional.linear))

    monkeypatch.setattr(operator, "F", Functions)
    monkeypatch.setattr(operator, "launch_shrink", noting("shrink", operator.launch_shrink))
    monkeypatch.setattr(operator, "launch_expand", noting("expand", operator.launch_expand))
    monkeypatch.setattr(operator, "launch_add", noting("add", operator.launch_add))
    return recorded_streams.log
