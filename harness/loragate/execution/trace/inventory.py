"""What a captured CUDA graph consists of, and what must hold for it. Pure.

Nothing is run: nodes, edges and the memory that nodes use are read from a real graph, or from a
capture that was recorded on modelled streams.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import combinations, zip_longest

from loragate.execution.trace.operations import Access
from loragate.execution.trace.spans import first_common
from loragate.execution.trace.waits import WAITS_FIRST, Waits


class NodeKind(StrEnum):
    KERNEL = "kernel"
    MEMSET = "memset"
    MEMCPY = "memcpy"
    HOST = "host"
    EVENT = "event"
    EMPTY = "empty"
    OTHER = "other"


class EdgeKind(StrEnum):
    # the second node starts when the first one has ended
    FULL = "full"
    # it starts earlier, and waits by itself before it uses what the first one left
    PROGRAMMATIC = "programmatic"


class Flaw(StrEnum):
    MISSING_KERNEL = "missing kernel"
    UNWANTED_KERNEL = "unwanted kernel"
    DANGLING = "dangling pointer"
    UNORDERED = "unordered pair"
    UNJOINED = "work that is not joined"
    NEEDLESS_COPY = "needless copy"
    DIFFERENT = "graph of another batch"


@dataclass(frozen=True, slots=True)
class Node:
    """`accesses` are the bytes that it uses, by what its arguments are called. `waits` and early
    accesses are known of kernels that are compiled without a GPU; of a captured graph every kernel
    is taken to wait first."""

    kind: NodeKind
    name: str
    grid: tuple[int, ...] = ()
    accesses: tuple[Access, ...] = ()
    waits: Waits = WAITS_FIRST


@dataclass(frozen=True, slots=True)
class Edge:
    """Node number `after` depends on node number `before`."""

    before: int
    after: int
    kind: EdgeKind = EdgeKind.FULL


@dataclass(frozen=True, slots=True)
class Inventory:
    """Nodes in an order that their edges allow. `own`: blocks in the graph's memory pool; `alive`:
    all other blocks that somebody holds. `ends`: nodes that the end of the capture follows."""

    nodes: tuple[Node, ...]
    edges: tuple[Edge, ...] = ()
    own: frozenset[int] = frozenset()
    alive: frozenset[int] = frozenset()
    ends: frozenset[int] | None = None
    block_names: Mapping[int, str] = field(default_factory=dict)

    def names(self) -> Counter[str]:
        """How many nodes have each name."""
        return Counter(node.name for node in self.nodes)


@dataclass(frozen=True, slots=True)
class Finding:
    flaw: Flaw
    message: str


def wrong_kernels(
    inventory: Inventory, wanted: Iterable[str], unwanted: Iterable[str] = ()
) -> Iterator[Finding]:
    """A graph that can meet an adapter holds all kernels that adapters need, any other none."""
    names = inventory.names()
    for name in sorted(set(wanted) - names.keys()):
        yield Finding(Flaw.MISSING_KERNEL, f"no node is {name}, which a batch with adapters needs")
    for name in sorted(set(unwanted) & names.keys()):
        yield Finding(Flaw.UNWANTED_KERNEL, f"{name} is for adapters, which no batch here has")


def dangling(inventory: Inventory) -> Iterator[Finding]:
    """All memory that a node uses is the graph's own, or held by somebody."""
    known = inventory.own | inventory.alive
    for number, node in enumerate(inventory.nodes):
        for block in dict.fromkeys(access.block for access in node.accesses):
            if block not in known:
                name = inventory.block_names.get(block, f"block {block}")
                called = [a.name for a in node.accesses if a.block == block and a.name]
                argument = f" as {called[0]}" if called else ""
                yield Finding(
                    Flaw.DANGLING,
                    f"{_node(inventory, number)} uses {name}{argument}, which nobody holds now",
                )


def unjoined(inventory: Inventory) -> Iterator[Finding]:
    """All work is done when the graph is."""
    if inventory.ends is None:
        return
    over = _ancestors(inventory).over
    done = set(inventory.ends).union(*(over[end] for end in inventory.ends))
    for number in range(len(inventory.nodes)):
        if number not in done:
            message = f"the end of the capture does not wait for {_node(inventory, number)}"
            yield Finding(Flaw.UNJOINED, message)


def unordered(inventory: Inventory) -> Iterator[Finding]:
    """Two nodes that use the same bytes, one of them writing, have a path between them. A
    programmatic edge orders what its second node does behind its wait."""
    ended = _ancestors(inventory)
    for first, second in combinations(range(len(inventory.nodes)), 2):
        if first in ended.at_start[second] or second in ended.at_start[first]:
            continue
        for one in inventory.nodes[first].accesses:
            for other in inventory.nodes[second].accesses:
                if one.block != other.block or not (one.is_write or other.is_write):
                    continue
                if not other.is_early and first in ended.waited[second]:
                    continue
                span = first_common(one.spans, other.spans)
                if span is not None:
                    yield _pair(inventory, (first, one), (second, other), span)


def needless_copies(inventory: Inventory) -> Iterator[Finding]:
    """No node copies one buffer into another one that both outlive the graph: that is how
    functionalised code gives a changed argument back."""
    for number, node in enumerate(inventory.nodes):
        if node.kind is not NodeKind.MEMCPY:
            continue
        blocks = {access.block for access in node.accesses}
        if len(blocks) > 1 and not blocks & inventory.own:
            names = " and ".join(inventory.block_names.get(b, f"block {b}") for b in sorted(blocks))
            message = f"{_node(inventory, number)} copies between {names}"
            yield Finding(Flaw.NEEDLESS_COPY, message)


def different(one: Inventory, other: Inventory, how: str) -> Iterator[Finding]:
    """Graphs of one key are the same, whatever batch was prepared when they were captured. `how`
    says what the other one is."""
    ours, theirs = _shape(one), _shape(other)
    for number, (mine, its) in enumerate(zip_longest(ours, theirs)):
        if mine != its:
            message = f"node {number} is {_text(mine)}, but {_text(its)} {how}"
            yield Finding(Flaw.DIFFERENT, message)
            return
    if set(one.edges) != set(other.edges):
        edge = min(set(one.edges) ^ set(other.edges), key=lambda e: (e.after, e.before))
        there = "only" if edge in other.edges else "not"
        message = f"{_node(one, edge.after)} depends on {_node(one, edge.before)} {there} {how}"
        yield Finding(Flaw.DIFFERENT, message)


@dataclass(frozen=True, slots=True)
class _Ended:
    """For each node those that have ended when it starts, when it has waited, and when it is over,
    which says of a kernel that ends without a wait no more than its start."""

    at_start: list[frozenset[int]] = field(default_factory=list)
    waited: list[frozenset[int]] = field(default_factory=list)
    over: list[frozenset[int]] = field(default_factory=list)


def _ancestors(inventory: Inventory) -> _Ended:
    ended = _Ended()
    nothing = frozenset[int]()
    for number, node in enumerate(inventory.nodes):
        full = [e.before for e in inventory.edges if e.after == number and e.kind is EdgeKind.FULL]
        ahead = [e.before for e in inventory.edges if e.after == number]
        # a kernel that lets this one start knows what has ended by then
        known = [
            (ended.at_start if inventory.nodes[n].waits.signals_early else ended.waited)[n]
            for n in ahead
        ]
        start = nothing.union(full, *known, *(ended.over[n] for n in full))
        waited = start.union(ahead, *(ended.over[n] for n in ahead))
        ended.at_start.append(start)
        ended.waited.append(waited)
        ended.over.append(start if node.waits.ends_unwaited else waited)
    return ended


def _shape(inventory: Inventory) -> list[tuple[object, ...]]:
    """Of each node what must not depend on the batch. Blocks of the pool are numbered by their
    first use."""
    numbers: dict[int, str] = {}
    found: list[tuple[object, ...]] = []
    for node in inventory.nodes:
        used = []
        for access in node.accesses:
            name = f"block {access.block}"
            if access.block in inventory.own:
                name = numbers.setdefault(access.block, f"own {len(numbers)}")
            used.append((access.name, name))
        found.append((node.kind, node.name, node.grid, tuple(used)))
    return found


def _text(shape: tuple[object, ...] | None) -> str:
    if shape is None:
        return "missing"
    _, name, grid, used = shape
    assert isinstance(used, tuple)
    return f"{name} of grid {grid or 'unknown'} on {', '.join(f'{a} {b}' for a, b in used)}"


def _pair(
    inventory: Inventory,
    first: tuple[int, Access],
    second: tuple[int, Access],
    span: tuple[int, int],
) -> Finding:
    (before, one), (after, other) = first, second
    name = inventory.block_names.get(one.block, f"block {one.block}")
    verbs = ["writes" if access.is_write else "reads" for access in (one, other)]
    message = (
        f"{_node(inventory, before)} {verbs[0]} and {_node(inventory, after)} {verbs[1]} bytes "
        f"{span[0]} to {span[1]} of {name}, without a path between them"
    )
    return Finding(Flaw.UNORDERED, message)


def _node(inventory: Inventory, number: int) -> str:
    return f"node {number} ({inventory.nodes[number].name})"
