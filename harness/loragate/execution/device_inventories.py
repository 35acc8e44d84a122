"""Captures of one step on a GPU, as inventories of the real graphs.

Nodes and edges are those of CUDA. Which bytes a Triton kernel reads and writes is known from its
TTIR, as it was recorded when the launch was captured: launches of one name belong to the nodes of
that name in their order. Of any other kernel the words of its arguments that are addresses count as
read, because nothing says what it writes; operators of torch are judged by `race`. A kernel that is
launched dependently is taken to wait before it uses anything.
"""

from __future__ import annotations

import gc
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from loragate.execution.graph import Captured, capture
from loragate.execution.graph_nodes import DeviceGraph, DeviceNode, read_graph
from loragate.execution.inventories import MAPPINGS, Captures, Step
from loragate.execution.streams.device import current_handle, recorded_device
from loragate.execution.streams.recorder import Recorder
from loragate.execution.trace.inventory import Inventory, Node
from loragate.execution.trace.operations import HOST, Access, Launch
from loragate.protocol import Trial, subject_code


@dataclass(frozen=True, slots=True)
class DeviceBlock:
    """Memory that torch's allocator hands out as one piece; `pool` is that of its segment."""

    start: int
    size: int
    is_used: bool
    pool: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class KernelUse:
    """A launch of Triton: bytes by their addresses, whether they are written, and the argument."""

    name: str
    ranges: tuple[tuple[int, int, bool, str], ...]


def device_captures(trial: Trial) -> Captures:
    """On a GPU."""
    recorder, step = Recorder("cuda", current_handle), Step(trial)
    captured: dict[str, Captured[Tensor]] = {}
    uses: dict[str, list[KernelUse]] = {}
    step.prepare(recorder)
    step.apply()
    with recorded_device(recorder), recorder:
        start = recorder.length
        step.apply()
        kernels = frozenset(use.name for use in _uses(recorder, start))
        for how in step.mappings:
            step.prepare(recorder, how)
            start = recorder.length
            with subject_code():
                captured[how] = capture(step.apply, warm_ups=0, is_kept=True)
            uses[how] = list(_uses(recorder, start))
        step.change(recorder)
    gc.collect()
    torch.cuda.synchronize()
    blocks = blocks_of(torch.cuda.memory_snapshot())  # type: ignore[no-untyped-call]
    found: dict[str, Inventory] = {}
    for how, one in captured.items():
        graph = read_graph(int(one.graph.raw_cuda_graph()))
        found[how] = inventory_of_device(graph, uses[how], blocks, tuple(one.graph.pool()))
    return Captures(kernels, found, found[MAPPINGS[0]])


def blocks_of(snapshot: Iterable[Mapping[str, Any]]) -> list[DeviceBlock]:
    """Of `torch.cuda.memory_snapshot()`."""
    return [
        DeviceBlock(
            int(block["address"]),
            int(block["size"]),
            str(block["state"]).startswith("active"),
            tuple(segment.get("segment_pool_id", (0, 0))),
        )
        for segment in snapshot
        for block in segment["blocks"]
    ]


def inventory_of_device(
    graph: DeviceGraph,
    uses: Iterable[KernelUse],
    blocks: Sequence[DeviceBlock],
    pool: tuple[int, ...],
) -> Inventory:
    """`uses` are those of the launches of the capture, in their order; a block is called by its
    place in `blocks`."""
    waiting = defaultdict[str, list[KernelUse]](list)
    for use in uses:
        waiting[use.name].append(use)
    nodes = []
    for node in graph.nodes:
        known = waiting[node.name].pop(0) if waiting[node.name] else None
        accesses = (*_known(known, blocks), *_words(node, known is not None, blocks))
        nodes.append(Node(node.kind, node.name, node.grid, accesses))
    return Inventory(
        tuple(nodes),
        graph.edges,
        own=frozenset(n for n, block in enumerate(blocks) if block.pool == pool),
        alive=frozenset(n for n, block in enumerate(blocks) if block.is_used),
        block_names={n: f"memory at {block.start:#x}" for n, block in enumerate(blocks)},
    )


def _known(use: KernelUse | None, blocks: Sequence[DeviceBlock]) -> Iterator[Access]:
    """What a launch of Triton was recorded to read and write."""
    for start, stop, is_write, name in use.ranges if use is not None else ():
        number = _place(start, blocks)
        if number is not None:
            span = (start - blocks[number].start, stop - blocks[number].start)
            yield Access(number, (span,), is_write, name)


def _words(node: DeviceNode, is_known: bool, blocks: Sequence[DeviceBlock]) -> Iterator[Access]:
    """The addresses among the arguments of a node; where it is known what the node does with them,
    they only have to be those of memory that somebody holds."""
    for word in node.words:
        number = _place(word.value, blocks)
        if number is not None:
            block = blocks[number]
            span = (word.value - block.start, block.size)
            spans = () if is_known else (span,)
            yield Access(number, spans, bool(word.is_write), f"argument {word.argument}")


def _place(address: int, blocks: Sequence[DeviceBlock]) -> int | None:
    for number, block in enumerate(blocks):
        if block.start <= address < block.start + block.size:
            return number
    return None


def _uses(recorder: Recorder, start: int) -> Iterator[KernelUse]:
    """The launches of Triton since an operation; operators of torch have no names of arguments."""
    for operation in recorder.operations(range(start, recorder.length)):
        if not isinstance(operation, Launch) or operation.stream == HOST:
            continue
        if any(access.name for access in operation.accesses):
            ranges = tuple(
                (first + low, first + high, access.is_write, access.name)
                for access in operation.accesses
                for first in (recorder.blocks.all[access.block].start,)
                for low, high in access.spans
            )
            yield KernelUse(operation.name, ranges)
