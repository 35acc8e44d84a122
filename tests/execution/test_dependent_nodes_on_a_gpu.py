"""Kernels of a real capture that are launched dependently, by where they wait."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from loragate.execution.device_inventories import blocks_of, inventory_of_device, uses_of
from loragate.execution.graph_nodes import read_graph
from loragate.execution.streams.device import current_handle, recorded_device
from loragate.execution.streams.recorder import Recorder
from loragate.execution.trace.inventory import EdgeKind, Flaw, unordered

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0),
    reason="dependent launches need a GPU of compute capability 9.0",
)
N = 64


@triton.jit
def fill(out, N: tl.constexpr, SIGNALS: tl.constexpr):  # type: ignore[no-untyped-def]
    if SIGNALS:
        gdc_launch_dependents()
    tl.store(out + tl.arange(0, N), 1.0)


@triton.jit
def take(x, out, N: tl.constexpr, WAITS: tl.constexpr):  # type: ignore[no-untyped-def]
    if WAITS == "first":
        gdc_wait()
    found = tl.load(x + tl.arange(0, N))
    if WAITS == "late":
        gdc_wait()
    tl.store(out + tl.arange(0, N), found)


def captured(waits: str, *, signals: bool) -> tuple[set[EdgeKind], list[Flaw]]:
    """Kinds of edges of a graph of `fill` and `take`, and what is wrong with it."""
    x, out = (torch.zeros(N, device="cuda") for _ in range(2))
    recorder = Recorder("cuda", current_handle)

    def run() -> None:
        fill[(1,)](x, N=N, SIGNALS=signals)
        take[(1,)](x, out, N=N, WAITS=waits, launch_pdl=True)

    with recorded_device(recorder), recorder:
        run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        with torch.cuda.graph(graph):
            start = recorder.length
            run()
            stop = recorder.length
    uses = list(uses_of(recorder, recorder.operations(range(start, stop))))
    assert [use.name for use in uses] == ["fill", "take"]
    blocks = blocks_of(torch.cuda.memory_snapshot())  # type: ignore[no-untyped-call]
    read = read_graph(int(graph.raw_cuda_graph()))
    inventory = inventory_of_device(read, uses, blocks, tuple(graph.pool()))
    return {edge.kind for edge in read.edges}, [found.flaw for found in unordered(inventory)]


@pytest.mark.parametrize("signals", [False, True])
def test_what_is_used_behind_the_wait_is_ordered(signals: bool) -> None:
    assert captured("first", signals=signals) == ({EdgeKind.PROGRAMMATIC}, [])


@pytest.mark.parametrize("waits", ["late", "never"])
def test_what_is_loaded_ahead_of_the_wait_is_not_ordered(waits: str) -> None:
    assert captured(waits, signals=True) == ({EdgeKind.PROGRAMMATIC}, [Flaw.UNORDERED])
