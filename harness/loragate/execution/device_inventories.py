"""Captures of one step on a GPU, as inventories of the real graphs.

Nodes and edges are those of CUDA. Which bytes a Triton kernel reads and writes is known from its
TTIR, as it was recorded when the launch was captured: launches of one name belong to the nodes of
that name in their order. Of the arguments of any other kernel it is only known that they are
addresses. What a kernel that is launched dependently uses before it waits is known from its TTIR,
too; one of somebody else is taken to wait before it uses anything.

What operators of torch use is known from their tensors, but not which nodes they became. They make
a second inventory, of the operations that were recorded during the capture.
"""

from __future__ import annotations

import gc
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from loragate.execution.graph_nodes import DeviceGraph, DeviceNode, read_graph
from loragate.execution.inventories import MAPPINGS, Captures, RecordedCapture, Step
from loragate.execution.streams.device import current_handle, recorded_device
from loragate.execution.streams.recorder import Recorder
from loragate.execution.trace.inventory import Inventory, Node
from loragate.execution.trace.operations import HOST, Access, Launch, Operation
from loragate.execution.trace.waits import WAITS_FIRST, Waits
from loragate.protocol import Trial

_COPIES = ("copy_", "_to_copy")


@dataclass(frozen=True, slots=True)
class DeviceBlock:
    """Memory that torch's allocator hands out as one piece; `pool` is that of its segment."""

    start: int
    size: int
    is_used: bool
    pool: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class KernelUse:
    """A launch of Triton: what it uses, by the address where the block of each access begins."""

    name: str
    accesses: tuple[tuple[int, Access], ...]
    waits: Waits = WAITS_FIRST


def device_captures(trial: Trial) -> Captures:
    """On a GPU."""
    recorder, step = Recorder("cuda", current_handle), Step(trial)
    captured: dict[str, RecordedCapture] = {}
    step.prepare(recorder)
    step.apply()
    with recorded_device(recorder), recorder:
        start = recorder.length
        step.apply()
        launched = recorder.operations(range(start, recorder.length))
        kernels = frozenset(use.name for use in uses_of(recorder, launched))
        for how in step.mappings:
            step.prepare(recorder, how)
            captured[how] = RecordedCapture(recorder, step, current_handle, id, is_kept=True)
        step.change(recorder)
    gc.collect()
    torch.cuda.synchronize()
    blocks = blocks_of(torch.cuda.memory_snapshot())  # type: ignore[no-untyped-call]
    found: dict[str, Inventory] = {}
    recorded: dict[str, Inventory] = {}
    for how, one in captured.items():
        graph, pool = read_graph(int(one.graph.raw_cuda_graph())), tuple(one.graph.pool())
        uses = uses_of(recorder, one.operations())
        found[how] = inventory_of_device(graph, uses, blocks, pool)
        recorded[how] = recorded_on_device(one, recorder, blocks, pool)
    return Captures(kernels, found, found[MAPPINGS[0]], recorded)


def recorded_on_device(
    captured: RecordedCapture,
    recorder: Recorder,
    blocks: Sequence[DeviceBlock],
    pool: tuple[int, ...],
) -> Inventory:
    """The operations of a capture. Memory of `pool` is its own, also where no operator allocated
    it; values that an operator takes from the host are in the graph, but for those of a copy."""
    known = recorder.blocks.all.values()
    own = [
        block.number
        for block in known
        if (place := _place(block.start, blocks)) is not None and blocks[place].pool == pool
    ]
    on_host = frozenset(block.number for block in known if block.on_host)
    operations = [
        replace(op, accesses=tuple(a for a in op.accesses if a.block not in on_host))
        if isinstance(op, Launch) and op.name not in _COPIES
        else op
        for op in captured.operations()
    ]
    return captured.inventory(operations, {}, own)


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
        waits = WAITS_FIRST if known is None else known.waits
        nodes.append(Node(node.kind, node.name, node.grid, accesses, waits))
    return Inventory(
        tuple(nodes),
        graph.edges,
        own=frozenset(n for n, block in enumerate(blocks) if block.pool == pool),
        alive=frozenset(n for n, block in enumerate(blocks) if block.is_used),
        block_names={n: f"memory at {block.start:#x}" for n, block in enumerate(blocks)},
    )


def _known(use: KernelUse | None, blocks: Sequence[DeviceBlock]) -> Iterator[Access]:
    """What a launch of Triton was recorded to read and write."""
    for first, access in use.accesses if use is not None else ():
        for low, high in access.spans:
            number = _place(first + low, blocks)
            if number is not None:
                moved = first - blocks[number].start
                yield replace(access, block=number, spans=((low + moved, high + moved),))


def _words(node: DeviceNode, is_known: bool, blocks: Sequence[DeviceBlock]) -> Iterator[Access]:
    """The addresses among the arguments of a node. They have to be those of memory that somebody
    holds; how much of it the node uses is known of copies and fills."""
    for word in node.words:
        number = _place(word.value, blocks)
        if number is not None:
            block = blocks[number]
            start = word.value - block.start
            spans = ((start, start + word.size),) if word.size and not is_known else ()
            yield Access(number, spans, bool(word.is_write), f"argument {word.argument}")


def _place(address: int, blocks: Sequence[DeviceBlock]) -> int | None:
    for number, block in enumerate(blocks):
        if block.start <= address < block.start + block.size:
            return number
    return None


def uses_of(recorder: Recorder, operations: Iterable[Operation]) -> Iterator[KernelUse]:
    """The launches of Triton; operators of torch have no names of arguments."""
    known = recorder.blocks.all
    for operation in operations:
        if not isinstance(operation, Launch) or operation.stream == HOST:
            continue
        if any(access.name for access in operation.accesses):
            accesses = tuple((known[a.block].start, a) for a in operation.accesses)
            yield KernelUse(operation.name, accesses, operation.waits)
