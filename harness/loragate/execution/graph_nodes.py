"""The nodes and edges of a CUDA graph that torch has captured, read through cuda-bindings.

torch needs that package itself on Linux; it is imported where it is used. Every list is asked for
twice: with 0 for the number of its entries, and with their number.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from loragate.execution.trace.inventory import Edge, EdgeKind, NodeKind

_WORD = 8
# cudaGraphDependencyTypeProgrammatic
_PROGRAMMATIC = 1
_KINDS = {
    "Kernel": NodeKind.KERNEL,
    "Memset": NodeKind.MEMSET,
    "Memcpy": NodeKind.MEMCPY,
    "Host": NodeKind.HOST,
    "EventRecord": NodeKind.EVENT,
    "WaitEvent": NodeKind.EVENT,
    "Empty": NodeKind.EMPTY,
}


class BindingsError(RuntimeError):
    """A call of CUDA failed."""


@dataclass(frozen=True, slots=True)
class Word:
    """Eight bytes of an argument, which may be an address; `size`: how many bytes are used from
    there on, where that is known."""

    argument: int
    value: int
    is_write: bool | None = None
    size: int | None = None


@dataclass(frozen=True, slots=True)
class DeviceNode:
    """`words`: the arguments of a kernel that have the size of an address; the addresses of a copy
    or a fill, for which it is known what is written.

    Structures that a kernel takes by value are left out. The one of `torch.cat` has room for more
    tensors than there are, and holds whatever was in memory behind the last one.
    """

    kind: NodeKind
    name: str
    grid: tuple[int, ...] = ()
    words: tuple[Word, ...] = ()


@dataclass(frozen=True, slots=True)
class DeviceGraph:
    """Nodes in an order that the edges allow; of several that it could be the one in which CUDA
    lists them, which is that of the capture."""

    nodes: tuple[DeviceNode, ...]
    edges: tuple[Edge, ...]


def read_graph(raw: int, runtime: Any = None, driver: Any = None) -> DeviceGraph:
    """The graph of `torch.cuda.CUDAGraph.raw_cuda_graph()`, which keeps it with `keep_graph=True`.

    `runtime` and `driver` are cuda.bindings.runtime and cuda.bindings.driver. Raises BindingsError.
    """
    runtime = runtime or import_module("cuda.bindings.runtime")
    driver = driver or import_module("cuda.bindings.driver")
    (_, count) = checked(runtime.cudaGraphGetNodes(raw, 0))
    nodes = list(checked(runtime.cudaGraphGetNodes(raw, count))[0])[:count] if count else []
    places = {int(node): place for place, node in enumerate(nodes)}
    order = _order(len(nodes), edges := list(_edges(runtime, raw, places)))
    moved = {old: new for new, old in enumerate(order)}
    return DeviceGraph(
        tuple(_node(runtime, driver, nodes[place]) for place in order),
        tuple(Edge(moved[e.before], moved[e.after], e.kind) for e in edges),
    )


def _edges(runtime: Any, raw: int, places: dict[int, int]) -> Iterator[Edge]:
    *_, count = checked(runtime.cudaGraphGetEdges(raw, 0))
    if not count:
        return
    before, after, data, count = checked(runtime.cudaGraphGetEdges(raw, count))
    for number in range(count):
        loose = int(data[number].type) == _PROGRAMMATIC
        kind = EdgeKind.PROGRAMMATIC if loose else EdgeKind.FULL
        yield Edge(places[int(before[number])], places[int(after[number])], kind)


def _order(count: int, edges: list[Edge]) -> list[int]:
    """All nodes, each behind those that it depends on, in their own order as far as possible."""
    waiting = {place: {e.before for e in edges if e.after == place} for place in range(count)}
    found: list[int] = []
    while waiting:
        ready = min(place for place, before in waiting.items() if not before)
        del waiting[ready]
        found.append(ready)
        for before in waiting.values():
            before.discard(ready)
    return found


def _node(runtime: Any, driver: Any, node: Any) -> DeviceNode:
    (kind,) = checked(runtime.cudaGraphNodeGetType(node))
    name = str(kind.name).removeprefix("cudaGraphNodeType")
    found = _KINDS.get(name, NodeKind.OTHER)
    if found is NodeKind.KERNEL:
        return _kernel(driver, node)
    if found is NodeKind.MEMSET:
        (fill,) = checked(runtime.cudaGraphMemsetNodeGetParams(node))
        size = (int(fill.height) - 1) * int(fill.pitch) + int(fill.width) * int(fill.elementSize)
        return DeviceNode(found, "memset", words=(Word(0, int(fill.dst), True, size),))
    if found is NodeKind.MEMCPY:
        (copy,) = checked(runtime.cudaGraphMemcpyNodeGetParams(node))
        target = Word(0, int(copy.dstPtr.ptr), True, _copied(copy.extent, copy.dstPtr))
        source = Word(1, int(copy.srcPtr.ptr), False, _copied(copy.extent, copy.srcPtr))
        return DeviceNode(found, "memcpy", words=(target, source))
    return DeviceNode(found, name)


def _copied(extent: Any, side: Any) -> int:
    """Bytes from the first to the last one of one side of a copy; its width is in bytes."""
    rows = (int(extent.depth) - 1) * int(side.ysize) + int(extent.height) - 1
    return rows * int(side.pitch) + int(extent.width)


def _kernel(driver: Any, node: Any) -> DeviceNode:
    (params,) = checked(driver.cuGraphKernelNodeGetParams(node))
    # a kernel that a library has loaded by itself has no function
    if int(params.func):
        get_name, get_size, handle = driver.cuFuncGetName, driver.cuFuncGetParamInfo, params.func
    else:
        get_name, get_size, handle = (
            driver.cuKernelGetName,
            driver.cuKernelGetParamInfo,
            params.kern,
        )
    (name,) = checked(get_name(handle))
    grid = (int(params.gridDimX), int(params.gridDimY), int(params.gridDimZ))
    words = tuple(_words(int(params.kernelParams), get_size, handle))
    return DeviceNode(NodeKind.KERNEL, _text(name), grid, words)


def _words(arguments: int, get_size: Any, handle: Any) -> Iterator[Word]:
    """`arguments`: the address of an array of the addresses of all arguments; 0 where a library
    hands them over in another way."""
    number = 0
    while arguments:
        status, _, size = get_size(handle, number)
        # behind the last one
        if int(status):
            return
        where = ctypes.c_void_p.from_address(arguments + number * _WORD).value
        if where and size == _WORD:
            yield Word(number, int.from_bytes(ctypes.string_at(where, size), "little"))
        number += 1


def _text(name: object) -> str:
    return name.decode() if isinstance(name, bytes) else str(name)


def checked(answer: tuple[Any, ...]) -> tuple[Any, ...]:
    """What a call returns behind its status."""
    status, *values = answer
    if int(status):
        raise BindingsError(f"CUDA returned {status}")
    return tuple(values)
