"""Reading the nodes of a CUDA graph, from modules of the shape of cuda-bindings, and on a GPU."""

from __future__ import annotations

import ctypes
import struct
from dataclasses import dataclass, field
from enum import IntEnum
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from loragate.execution.graph_nodes import BindingsError, Word, read_graph
from loragate.execution.trace.inventory import Edge, EdgeKind, NodeKind

Type = IntEnum(
    "Type",
    {
        f"cudaGraphNodeType{n}": i
        for i, n in enumerate(
            ("Kernel", "Memcpy", "Memset", "Host", "Graph", "Empty", "WaitEvent", "EventRecord")
        )
    },
)


class Status(IntEnum):
    SUCCESS = 0
    INVALID_VALUE = 1


class Handle:
    """A node, a function or a kernel: an integer for whoever asks."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __int__(self) -> int:
        return self.number


@dataclass
class Fake:
    """The calls of cuda.bindings.runtime and .driver for one graph. The kernels of even numbers are
    functions, others have a handle of another kind."""

    types: list[str]
    edges: list[tuple[int, int, int]] = field(default_factory=list)
    arguments: dict[int, list[bytes]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.nodes = [Handle(100 + n) for n in range(len(self.types))]
        self.kept: list[Any] = []

    def cudaGraphGetNodes(self, graph: int, count: int = 0) -> tuple[Any, ...]:
        assert graph == 7
        return Status.SUCCESS, self.nodes if count else None, len(self.nodes)

    def cudaGraphGetEdges(self, graph: int, count: int = 0) -> tuple[Any, ...]:
        if not count:
            return Status.SUCCESS, None, None, None, len(self.edges)
        before = [self.nodes[edge[0]] for edge in self.edges]
        after = [self.nodes[edge[1]] for edge in self.edges]
        data = [SimpleNamespace(type=edge[2]) for edge in self.edges]
        return Status.SUCCESS, before, after, data, len(self.edges)

    def cudaGraphNodeGetType(self, node: Handle) -> tuple[Any, ...]:
        return Status.SUCCESS, Type[f"cudaGraphNodeType{self.types[int(node) - 100]}"]

    def cudaGraphMemsetNodeGetParams(self, node: Handle) -> tuple[Any, ...]:
        return Status.SUCCESS, SimpleNamespace(
            dst=0x5000, elementSize=4, width=8, height=3, pitch=64
        )

    def cudaGraphMemcpyNodeGetParams(self, node: Handle) -> tuple[Any, ...]:
        source = SimpleNamespace(ptr=0x1000, pitch=48, ysize=2)
        target = SimpleNamespace(ptr=0x2000, pitch=256, ysize=4)
        extent = SimpleNamespace(width=48, height=2, depth=2)
        return Status.SUCCESS, SimpleNamespace(srcPtr=source, dstPtr=target, extent=extent)

    def cuGraphKernelNodeGetParams(self, node: Handle) -> tuple[Any, ...]:
        number = int(node) - 100
        buffers = [ctypes.create_string_buffer(a, len(a)) for a in self.arguments.get(number, [])]
        array = (ctypes.c_void_p * max(1, len(buffers)))(*map(ctypes.addressof, buffers))
        self.kept += [buffers, array]
        own = Handle(200 + number)
        return Status.SUCCESS, SimpleNamespace(
            func=own if number % 2 == 0 else Handle(0),
            kern=own,
            gridDimX=number + 1,
            gridDimY=2,
            gridDimZ=1,
            kernelParams=ctypes.addressof(array) if buffers else 0,
        )

    def cuFuncGetName(self, function: Handle) -> tuple[Any, ...]:
        assert int(function) % 2 == 0
        return Status.SUCCESS, f"function_{int(function) - 200}".encode()

    def cuKernelGetName(self, kernel: Handle) -> tuple[Any, ...]:
        return Status.SUCCESS, f"kernel_{int(kernel) - 200}".encode()

    def cuFuncGetParamInfo(self, function: Handle, number: int) -> tuple[Any, ...]:
        arguments = self.arguments.get(int(function) - 200, [])
        if number >= len(arguments):
            return Status.INVALID_VALUE, 0, 0
        return Status.SUCCESS, 8 * number, len(arguments[number])

    cuKernelGetParamInfo = cuFuncGetParamInfo


def test_kernels_have_names_grids_and_the_arguments_that_may_be_addresses() -> None:
    # what is behind the last tensor of a structure may be anything
    struct_of_two = struct.pack("<QQ", 0x3000, 0x9000)
    arguments = [struct.pack("<Q", 0x1000), struct.pack("<i", 5), struct_of_two]
    fake = Fake(["Kernel", "Kernel"], arguments={0: arguments, 1: arguments[:1]})
    first, second = read_graph(7, fake, fake).nodes
    assert (first.kind, first.name, first.grid) == (NodeKind.KERNEL, "function_0", (1, 2, 1))
    assert first.words == (Word(0, 0x1000),)
    assert (second.name, second.words) == ("kernel_1", (Word(0, 0x1000),))


def test_copies_and_fills_say_what_they_write_from_the_first_to_the_last_byte() -> None:
    fake = Fake(["Memcpy", "Memset", "EventRecord", "Graph"])
    copy, fill, event, other = read_graph(7, fake, fake).nodes
    target, source = (4 + 1) * 256 + 48, (2 + 1) * 48 + 48
    assert copy.words == (Word(0, 0x2000, True, target), Word(1, 0x1000, False, source))
    assert fill.words == (Word(0, 0x5000, True, 2 * 64 + 8 * 4),)
    assert (event.kind, other.kind) == (NodeKind.EVENT, NodeKind.OTHER)


def test_edges_say_whether_they_are_programmatic() -> None:
    fake = Fake(["Kernel"] * 3, edges=[(0, 1, 0), (1, 2, 1)])
    assert read_graph(7, fake, fake).edges == (Edge(0, 1), Edge(1, 2, EdgeKind.PROGRAMMATIC))


def test_nodes_come_behind_those_that_they_depend_on() -> None:
    fake = Fake(["Kernel"] * 4, edges=[(3, 1, 0), (2, 3, 0)])
    graph = read_graph(7, fake, fake)
    assert [node.grid[0] - 1 for node in graph.nodes] == [0, 2, 3, 1]
    assert set(graph.edges) == {Edge(1, 2), Edge(2, 3)}


def test_a_graph_without_nodes_has_none() -> None:
    graph = read_graph(7, Fake([]), Fake([]))
    assert (graph.nodes, graph.edges) == ((), ())


def test_a_call_that_fails_is_an_error() -> None:
    fake = Fake(["Kernel"])
    fake.cudaGraphNodeGetType = lambda node: (Status.INVALID_VALUE, None)  # type: ignore[method-assign]
    with pytest.raises(BindingsError, match="CUDA returned"):
        read_graph(7, fake, fake)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="reads a graph of a GPU")
def test_the_nodes_of_a_real_capture_are_those_that_were_captured() -> None:
    x, y = torch.ones(64, device="cuda"), torch.zeros(64, device="cuda")
    runtime = import_module("cuda.bindings.runtime")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph):
        y.copy_(x)
        # its tensors are in a structure, which is left out
        joined = torch.cat([x, y])
        stream = torch.cuda.current_stream().cuda_stream
        # torch fills by a kernel
        (status,) = runtime.cudaMemsetAsync(y.data_ptr(), 0, 4 * len(y), stream)
    assert int(status) == 0
    read = read_graph(graph.raw_cuda_graph())
    assert [node.kind for node in read.nodes] == [
        NodeKind.MEMCPY,
        NodeKind.KERNEL,
        NodeKind.MEMSET,
    ]
    assert read.edges == (Edge(0, 1), Edge(1, 2))
    copied = (Word(0, y.data_ptr(), True, 256), Word(1, x.data_ptr(), False, 256))
    assert read.nodes[0].words == copied
    assert {word.value for word in read.nodes[1].words} == {joined.data_ptr()}
    assert read.nodes[2].words == (Word(0, y.data_ptr(), True, 256),)
