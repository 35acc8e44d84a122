"""The inventory of a capture that was recorded as operations of streams. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from loragate.execution.trace.inventory import Edge, Inventory, Node, NodeKind
from loragate.execution.trace.operations import HOST, Launch, Operation, Record, Wait

_KINDS = {"copy_": NodeKind.MEMCPY, "zero_": NodeKind.MEMSET}


def inventory_of(
    captured: Sequence[Operation],
    stream: int,
    *,
    grids: Mapping[int, tuple[int, ...]],
    own: Iterable[int],
    alive: Iterable[int],
    block_names: Mapping[int, str],
) -> Inventory:
    """`stream` is the one that captures; `grids` are those of launches of Triton, by their number
    among the operations.

    An edge leads to a node from the last node of its stream, and from what the stream waited for
    since. What the host does by itself is no node.
    """
    nodes: list[Node] = []
    edges: list[Edge] = []
    # nodes that the next node of a stream, and what waits for an event, depend on
    tails: defaultdict[int, set[int]] = defaultdict(set)
    recorded: dict[int, set[int]] = {}
    for index, operation in enumerate(captured):
        if isinstance(operation, Launch) and operation.stream != HOST:
            edges += [Edge(before, len(nodes)) for before in sorted(tails[operation.stream])]
            tails[operation.stream] = {len(nodes)}
            kind = _KINDS.get(operation.name, NodeKind.KERNEL)
            grid = grids.get(index, ())
            nodes.append(Node(kind, operation.name, grid, operation.accesses, operation.waits))
        elif isinstance(operation, Record):
            recorded[operation.event] = set(tails[operation.stream])
        elif isinstance(operation, Wait):
            # an event that was recorded before the capture is no part of the graph
            tails[operation.stream] |= recorded.get(operation.event, set())
    return Inventory(
        tuple(nodes),
        tuple(edges),
        frozenset(own),
        frozenset(alive),
        frozenset(tails[stream]),
        dict(block_names),
    )
