"""Inventories of real graphs: addresses, and what Triton launches do with them."""

from __future__ import annotations

from dataclasses import replace

from loragate.execution.device_inventories import (
    DeviceBlock,
    KernelUse,
    blocks_of,
    inventory_of_device,
)
from loragate.execution.graph_nodes import DeviceGraph, DeviceNode, Word
from loragate.execution.trace.inventory import (
    Edge,
    EdgeKind,
    Flaw,
    NodeKind,
    dangling,
    needless_copies,
    unordered,
)
from loragate.execution.trace.operations import Access
from loragate.execution.trace.waits import Waits

POOL = (0, 3)
X = DeviceBlock(0x1000, 0x100, is_used=True, pool=(0, 0))
GONE = DeviceBlock(0x1100, 0x100, is_used=False, pool=(0, 0))
OWN = DeviceBlock(0x9000, 0x200, is_used=False, pool=POOL)
BLOCKS = [X, GONE, OWN]


def node(name: str, *words: Word, kind: NodeKind = NodeKind.KERNEL) -> DeviceNode:
    return DeviceNode(kind, name, (1, 1, 1), words)


def used(name: str, start: int, *, is_write: bool = False, is_early: bool = False) -> KernelUse:
    """128 bytes from `start` on, in a block that begins 64 bytes ahead of it."""
    access = Access(7, ((64, 192),), is_write, "shrunk_ptr", is_early)
    return KernelUse(name, ((start - 64, access),))


def test_a_snapshot_is_cut_into_blocks_of_their_pools() -> None:
    snapshot = [
        {
            "segment_pool_id": (0, 3),
            "blocks": [
                {"address": 0x9000, "size": 0x200, "state": "inactive"},
                {"address": 0x9200, "size": 0x10, "state": "active_allocated"},
                {"address": 0x9210, "size": 0x10, "state": "active_awaiting_free"},
            ],
        },
        {"blocks": [{"address": 0x1000, "size": 0x100, "state": "active_allocated"}]},
    ]
    first, second, third, other = blocks_of(snapshot)
    assert first == OWN
    assert (second.is_used, third.is_used) == (True, True)
    assert other == X


def test_an_address_of_memory_that_was_freed_is_found() -> None:
    held = node("gemm", Word(0, 0x1010), Word(1, 0x9000), Word(2, 77))
    lost = node("shrink", Word(0, 0x1180))
    graph = inventory_of_device(DeviceGraph((held, lost), ()), [], BLOCKS, POOL)
    (finding,) = dangling(graph)
    assert finding.message == (
        "node 1 (shrink) uses memory at 0x1100 as argument 0, which nobody holds now"
    )


def test_memory_of_a_pool_stays_with_its_graph_alone() -> None:
    graph = DeviceGraph((node("gemm", Word(0, 0x9000)),), ())
    assert not list(dangling(inventory_of_device(graph, [], BLOCKS, POOL)))
    assert len(list(dangling(inventory_of_device(graph, [], BLOCKS, (0, 4))))) == 1


def test_launches_of_triton_are_known_by_name_and_order() -> None:
    writes = used("shrink", 0x9000, is_write=True)
    elsewhere = used("shrink", 0x9080, is_write=True)
    reads = used("expand", 0x9080)
    word = Word(0, 0x9000)
    nodes = (node("shrink", word), node("shrink", word), node("expand", word))
    uses = [reads, writes, elsewhere]
    graph = inventory_of_device(DeviceGraph(nodes, ()), uses, BLOCKS, POOL)
    (finding,) = unordered(graph)
    assert finding.flaw is Flaw.UNORDERED
    assert "node 1 (shrink) writes and node 2 (expand) reads bytes 128 to 256" in finding.message
    ordered = inventory_of_device(DeviceGraph(nodes, (Edge(1, 2),)), uses, BLOCKS, POOL)
    assert not list(unordered(ordered))


def test_what_a_launch_does_ahead_of_its_wait_belongs_to_its_node() -> None:
    nodes = (node("shrink"), node("expand"), node("next"))
    edges = (Edge(0, 1, EdgeKind.PROGRAMMATIC), Edge(1, 2))
    writes, reads = used("shrink", 0x9000, is_write=True), used("expand", 0x9000)

    def found(*uses: KernelUse) -> list[Flaw]:
        graph = inventory_of_device(DeviceGraph(nodes, edges), uses, BLOCKS, POOL)
        return [each.flaw for each in unordered(graph)]

    assert found(writes, reads) == []
    assert found(writes, used("expand", 0x9000, is_early=True)) == [Flaw.UNORDERED]
    later = used("next", 0x9000)
    assert found(writes, reads, later) == []
    unwaited = Waits(signals_early=True, ends_unwaited=True)
    assert found(writes, replace(reads, waits=unwaited), later) == [Flaw.UNORDERED]


def test_a_copy_between_buffers_that_outlive_the_graph_is_needless() -> None:
    other = DeviceBlock(0x2000, 0x100, is_used=True, pool=(0, 0))
    words = (Word(0, 0x2000, is_write=True), Word(1, 0x1000, is_write=False))
    graph = DeviceGraph((node("memcpy", *words, kind=NodeKind.MEMCPY),), ())
    found = needless_copies(inventory_of_device(graph, [], [*BLOCKS, other], POOL))
    assert [finding.flaw for finding in found] == [Flaw.NEEDLESS_COPY]
