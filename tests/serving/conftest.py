"""These tests are about host logic and small numbers: they run in Triton's interpreter even on a
machine with a GPU. The switch must be set before lorakernels is imported."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

os.environ["TRITON_INTERPRET"] = "1"

from ..watched import stacked, watched_kernels  # noqa: F401


@pytest.fixture
def run_compiled() -> Callable[[str], None]:
    """Runs a script in a process of its own, where kernels are compiled for the GPU."""

    def run(script: str) -> None:
        compiled = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
        command = (sys.executable, "-c", script)
        done = subprocess.run(command, env=compiled, capture_output=True, text=True, timeout=580)
        assert done.returncode == 0, done.stderr

    return run


class Stream:
    """A stream that runs everything at once."""

    def wait_stream(self, other: Stream) -> None:
        pass

    def wait_event(self, event: Event) -> None:
        pass


class Event:
    def record(self, stream: Stream) -> None:
        pass


@dataclass
class Graph:
    """What was launched between the beginning and the end of a capture, to be launched again with
    the same arguments. `launches` are names of kernels."""

    calls: list[Callable[[], Any]] = field(default_factory=list)
    launches: list[str] = field(default_factory=list)
    pool: object = None
    replays: int = 0

    def replay(self) -> None:
        self.replays += 1
        for call in self.calls:
            call()


class Graphs:
    """What lorakernels uses of torch.cuda for graphs, for a device without: the launches of
    Triton's interpreter and the calls of `recorded` are recorded, and a replay does them again. The
    host code of a step does not run in a replay, as on a GPU."""

    CUDAGraph, Event = Graph, Event

    def __init__(self) -> None:
        self.main = Stream()
        self.open: Graph | None = None
        self.made: list[Graph] = []
        self.log: list[str] = []

    def Stream(self, device: torch.device, priority: int = 0) -> Stream:
        return Stream()

    def graph_pool_handle(self) -> object:
        return object()

    def synchronize(self, device: object = None) -> None:
        self.log.append("synchronize")

    def current_stream(self, device: object = None) -> Stream:
        return self.main

    def device(self, device: torch.device) -> AbstractContextManager[None]:
        return nullcontext()

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        yield

    def is_current_stream_capturing(self) -> bool:
        return self.open is not None

    @contextmanager
    def graph(self, graph: Graph, *, pool: object, stream: Stream) -> Iterator[None]:
        graph.pool = pool
        self.open = graph
        try:
            yield
        finally:
            self.open = None
        self.made.append(graph)

    def recorded(self, call: Callable[[], Any]) -> Any:
        """Do something on the device."""
        if self.open is not None:
            self.open.calls.append(call)
        return call()


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Graphs:
    """Gives every device graphs that record the launches of the interpreter and base products."""
    from triton.runtime.interpreter import GridExecutor

    from lorakernels.dense import linear
    from lorakernels.runtime import streams

    fake, launch = Graphs(), GridExecutor.__call__

    def recording(self: GridExecutor, *args: Any, **kwargs: Any) -> Any:
        if fake.open is not None:
            fake.open.launches.append(self.fn.__name__)
        return fake.recorded(lambda: launch(self, *args, **kwargs))

    class Functions:
        @staticmethod
        def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            out = torch.empty(len(x), len(weight), dtype=x.dtype)
            return fake.recorded(lambda: out.copy_(F.linear(x, weight, bias)))

    monkeypatch.setattr(linear, "F", Functions)
    monkeypatch.setattr(GridExecutor, "__call__", recording)
    monkeypatch.setattr(streams, "stream_module", lambda device: fake)
    return fake


HIDDEN, INTER, EXPERTS, TOP_K, RANK, SLOTS, MOST = 16, 8, 3, 2, 4, 3, 12


def randn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) / 2


@dataclass(frozen=True)
class Factors:
    """An adapter of the stack: those of the linear layer, of gate, up and down."""

    a: Tensor
    b: Tensor
    scale: float


def adapter(seed: int) -> list[Factors]:
    """All ranks differ from each other and, mostly, from adapter to adapter."""
    ranks = [1 + (seed + part) % RANK for part in range(4)]
    shapes = [((HIDDEN,), (HIDDEN,)), *[((HIDDEN,), (INTER,))] * 2, ((INTER,), (HIDDEN,))]
    made = []
    for part, (rank, ((k,), (n,))) in enumerate(zip(ranks, shapes, strict=True)):
        lead = (EXPERTS,) if part else ()
        a = randn(*lead, rank, k, seed=100 * seed + part)
        made.append(Factors(a, randn(*lead, n, rank, seed=100 * seed + part + 50), 0.5 + part))
    return made


class Stack:
    """A linear layer and, with `moe`, a MoE layer behind it, with everything that serves them."""

    def __init__(self, *, max_tokens: int = MOST, slots: int = SLOTS, moe: bool = False) -> None:
        from lorakernels.layers.gate_up import GateUp
        from lorakernels.layers.linear import LoRALinear
        from lorakernels.layers.moe import FusedMoELoRA
        from lorakernels.layers.partition import Slice
        from lorakernels.serving.buffers import ServingBuffers
        from lorakernels.serving.inputs import InputSpec, StepInputs

        self.weight = randn(HIDDEN, HIDDEN, seed=1)
        self.w13 = randn(EXPERTS, 2 * INTER, HIDDEN, seed=2)
        self.w2 = randn(EXPERTS, HIDDEN, INTER, seed=3)
        sizes = {"num_slots": slots, "rank": RANK}
        self.linear = LoRALinear(self.weight, slices=[Slice("o", HIDDEN)], **sizes)
        self.experts = FusedMoELoRA(self.w13, self.w2, gate_up=GateUp.HALVES, **sizes)
        self.layers = {"linear": self.linear, **({"experts": self.experts} if moe else {})}
        self.buffers = ServingBuffers.reserve(self.layers, max_tokens=max_tokens, top_k=TOP_K)
        specs = {
            "x": InputSpec(dtype=torch.float32, shape=(HIDDEN,)),
            "ids": InputSpec(dtype=torch.int32, shape=(TOP_K,)),
            "router": InputSpec(dtype=torch.float32, shape=(TOP_K,)),
        }
        self.inputs = StepInputs(specs, max_tokens=max_tokens, device="cpu")
        self.resident: dict[int, list[Factors]] = {}
        # the rows of each call of `step`
        self.called: list[int] = []
        self.moe = moe

    def step(self, rows: int) -> Tensor:
        self.called.append(rows)
        batch, inputs = self.buffers.batch, self.inputs
        hidden = self.linear(inputs["x"][:rows], batch, self.buffers.dense)
        if not self.moe:
            return hidden
        return self.experts(
            hidden,
            inputs["ids"][:rows],
            inputs["router"][:rows],
            batch,
            self.buffers.pairs(self.experts),
            self.buffers.experts(self.experts),
        )

    def load(self, slot: int, seed: int) -> None:
        from lorakernels.dense.weights import LoRAFactors
        from lorakernels.moe.weights import ExpertFactors

        parts = self.resident[slot] = adapter(seed)
        dense, *experts = parts
        gate, up, down = (ExpertFactors(p.a, p.b, p.scale) for p in experts)
        self.linear.slots.load(slot, [LoRAFactors(dense.a, dense.b, dense.scale)])
        self.experts.w13_slots.load(slot, [gate, up])
        self.experts.w2_slots.load(slot, [down])

    def evict(self, slot: int) -> None:
        self.resident.pop(slot, None)
        for layer in self.layers.values():
            layer.unload(slot)

    def values(self, rows: int, seed: int) -> dict[str, Tensor]:
        """Inputs of a step."""
        order = randn(rows, EXPERTS, seed=seed + 1).argsort(1)
        return {
            "x": randn(rows, HIDDEN, seed=seed),
            "ids": order[:, :TOP_K].int().contiguous(),
            "router": randn(rows, TOP_K, seed=seed + 2).abs(),
        }

    def wanted(self, slots: list[int], values: dict[str, Tensor]) -> Tensor:
        """What plain torch makes of each row by itself."""
        rows = [
            self._row(slot, *(values[name][row] for name in ("x", "ids", "router")))
            for row, slot in enumerate(slots)
        ]
        return torch.stack(rows) if rows else torch.empty(0, HIDDEN)

    def _row(self, slot: int, x: Tensor, ids: Tensor, router: Tensor) -> Tensor:
        given = self.resident.get(slot)
        hidden = self.weight @ x
        if given:
            hidden = hidden + given[0].scale * (given[0].b @ (given[0].a @ x))
        if not self.moe:
            return hidden
        out = torch.zeros(HIDDEN)
        for expert, weight in zip(ids.tolist(), router, strict=True):
            gate, up = (self.w13[expert] @ hidden).split(INTER)
            if given:
                gate, up = (
                    base + part.scale * (part.b[expert] @ (part.a[expert] @ hidden))
                    for base, part in zip((gate, up), given[1:3], strict=True)
                )
            act = F.silu(gate) * up
            down = self.w2[expert] @ act
            if given:
                part = given[3]
                down = down + part.scale * (part.b[expert] @ (part.a[expert] @ act))
            out = out + weight * down
        return out


@pytest.fixture
def make_stack() -> type[Stack]:
    return Stack


@pytest.fixture
def stack(make_stack: Any) -> Any:
    made = make_stack()
    made.load(0, seed=1)
    made.load(2, seed=2)
    return made
