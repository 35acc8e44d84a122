"""What must hold for the nodes of a captured graph, on graphs that are made up."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loragate.execution.trace.captured import inventory_of
from loragate.execution.trace.clocks import Clocks
from loragate.execution.trace.inventory import (
    Edge,
    EdgeKind,
    Finding,
    Flaw,
    Inventory,
    Node,
    NodeKind,
    dangling,
    different,
    needless_copies,
    unjoined,
    unordered,
    wrong_kernels,
)
from loragate.execution.trace.operations import (
    HOST,
    Access,
    Launch,
    Operation,
    Record,
    Trace,
    Wait,
)
from loragate.execution.trace.waits import WAITS_FIRST, Waits

X, SHRUNK, OUT, TABLE = range(4)
MAIN, SIDE = 1, 2


def reads(block: int, stop: int = 8, name: str = "") -> Access:
    return Access(block, ((0, stop),), is_write=False, name=name)


def writes(block: int, stop: int = 8, name: str = "") -> Access:
    return Access(block, ((0, stop),), is_write=True, name=name)


def kernel(name: str, *accesses: Access, waits: Waits = WAITS_FIRST) -> Node:
    return Node(NodeKind.KERNEL, name, (4,), accesses, waits)


# base product and shrink side by side, and the expand behind both
BASE = kernel("base", reads(X), writes(OUT))
SHRINK = kernel("shrink", reads(X), reads(TABLE), writes(SHRUNK))
EXPAND = kernel("expand", reads(SHRUNK), reads(OUT), writes(OUT))
RIGHT = Inventory(
    (BASE, SHRINK, EXPAND),
    (Edge(0, 2), Edge(1, 2)),
    own=frozenset({OUT}),
    alive=frozenset({X, SHRUNK, TABLE}),
    ends=frozenset({2}),
    block_names={X: "x", SHRUNK: "shrink output", OUT: "out", TABLE: "tile_rows"},
)
LORA = ("shrink", "expand")


def flaws(findings: Iterator[Finding]) -> list[Flaw]:
    return [finding.flaw for finding in findings]


def all_flaws(graph: Inventory) -> list[Flaw]:
    checks = (
        wrong_kernels(graph, LORA),
        dangling(graph),
        unjoined(graph),
        unordered(graph),
        needless_copies(graph),
        different(graph, graph, "again"),
    )
    return [flaw for check in checks for flaw in flaws(check)]


def test_a_right_graph_has_no_flaw() -> None:
    assert all_flaws(RIGHT) == []


def test_a_graph_that_can_meet_an_adapter_lacks_no_kernel_of_adapters() -> None:
    graph = replace(RIGHT, nodes=(BASE,), edges=(), ends=frozenset({0}))
    assert [f.message for f in wrong_kernels(graph, LORA)] == [
        "no node is expand, which a batch with adapters needs",
        "no node is shrink, which a batch with adapters needs",
    ]
    assert flaws(wrong_kernels(graph, (), LORA)) == []


def test_a_graph_that_meets_no_adapter_has_no_kernel_of_adapters() -> None:
    assert flaws(wrong_kernels(RIGHT, ("base",), LORA)) == [Flaw.UNWANTED_KERNEL] * 2


def test_memory_that_nobody_holds_is_named_with_its_node() -> None:
    graph = replace(RIGHT, alive=frozenset({X, SHRUNK}))
    (finding,) = dangling(graph)
    assert finding.message == "node 1 (shrink) uses tile_rows, which nobody holds now"


def test_a_missing_join_leaves_work_unjoined_and_pairs_unordered() -> None:
    graph = replace(RIGHT, edges=(Edge(0, 2),))
    (finding,) = unjoined(graph)
    assert finding.message == "the end of the capture does not wait for node 1 (shrink)"
    (pair,) = unordered(graph)
    assert pair.message == (
        "node 1 (shrink) writes and node 2 (expand) reads bytes 0 to 8 of shrink output, "
        "without a path between them"
    )


def test_nodes_that_only_read_or_use_other_bytes_need_no_path() -> None:
    apart = kernel("apart", Access(OUT, ((8, 16),), is_write=True))
    graph = replace(RIGHT, nodes=(BASE, SHRINK, EXPAND, apart))
    assert flaws(unordered(graph)) == []
    touching = kernel("touching", Access(OUT, ((7, 16),), is_write=True))
    graph = replace(RIGHT, nodes=(BASE, SHRINK, EXPAND, touching))
    assert flaws(unordered(graph)) == [Flaw.UNORDERED] * 3


def test_a_path_over_other_nodes_orders() -> None:
    middle = kernel("middle")
    graph = Inventory((SHRINK, middle, EXPAND), (Edge(0, 1), Edge(1, 2)))
    assert flaws(unordered(graph)) == []


LOOSE = EdgeKind.PROGRAMMATIC
EARLY = replace(reads(SHRUNK), is_early=True)


def test_a_programmatic_edge_orders_only_what_follows_the_wait() -> None:
    early, late = kernel("expand", EARLY), kernel("expand", reads(SHRUNK))
    edge = Edge(0, 1, LOOSE)
    assert flaws(unordered(Inventory((SHRINK, late), (edge,)))) == []
    assert flaws(unordered(Inventory((SHRINK, early), (edge,)))) == [Flaw.UNORDERED]
    assert flaws(unordered(Inventory((SHRINK, early), (Edge(0, 1),)))) == []


@pytest.mark.parametrize(
    ("first", "waits", "found"),
    [
        (EdgeKind.FULL, WAITS_FIRST, 0),
        # it starts behind the first node, whatever it waits for
        (EdgeKind.FULL, Waits(signals_early=True, ends_unwaited=True), 0),
        (LOOSE, WAITS_FIRST, 0),
        (LOOSE, Waits(signals_early=True), 1),
        (LOOSE, Waits(signals_early=True, ends_unwaited=True), 1),
    ],
)
def test_a_kernel_starts_behind_what_the_one_before_knew_when_it_let_it_start(
    first: EdgeKind, waits: Waits, found: int
) -> None:
    nodes = SHRINK, kernel("middle", waits=waits), kernel("last", EARLY)
    graph = Inventory(nodes, (Edge(0, 1, first), Edge(1, 2, LOOSE)))
    assert flaws(unordered(graph)) == [Flaw.UNORDERED] * found


@pytest.mark.parametrize("second", EdgeKind)
@pytest.mark.parametrize(
    ("waits", "found"), [(WAITS_FIRST, 0), (Waits(signals_early=True, ends_unwaited=True), 1)]
)
def test_behind_a_kernel_that_ends_without_a_wait_those_before_it_may_still_run(
    second: EdgeKind, waits: Waits, found: int
) -> None:
    nodes = SHRINK, kernel("middle", waits=waits), kernel("last", reads(SHRUNK))
    edges = Edge(0, 1, LOOSE), Edge(1, 2, second)
    graph = Inventory(nodes, edges, ends=frozenset({2}))
    assert flaws(unordered(graph)) == [Flaw.UNORDERED] * found
    assert flaws(unjoined(graph)) == [Flaw.UNJOINED] * found


def test_a_copy_between_buffers_that_outlive_the_graph_is_needless() -> None:
    copy = Node(NodeKind.MEMCPY, "copy_", accesses=(writes(X), reads(SHRUNK)))
    within = Node(NodeKind.MEMCPY, "copy_", accesses=(writes(OUT), reads(SHRUNK)))
    graph = Inventory((copy, within), own=RIGHT.own, block_names=RIGHT.block_names)
    (finding,) = needless_copies(graph)
    assert finding.message == "node 0 (copy_) copies between x and shrink output"


def test_graphs_of_one_key_differ_in_nothing() -> None:
    taller = replace(RIGHT, nodes=(BASE, replace(SHRINK, grid=(5,)), EXPAND))
    (finding,) = different(RIGHT, taller, "with base rows only")
    assert "node 1 is shrink of grid (4,)" in finding.message
    assert "shrink of grid (5,)" in finding.message
    shorter = replace(RIGHT, nodes=(BASE, SHRINK))
    assert "but missing" in next(different(RIGHT, shorter, "then")).message
    other_table = kernel("shrink", reads(X), reads(9), writes(SHRUNK))
    graph = replace(RIGHT, nodes=(BASE, other_table, EXPAND))
    assert flaws(different(RIGHT, graph, "then")) == [Flaw.DIFFERENT]
    serial = replace(RIGHT, edges=(Edge(0, 1), Edge(1, 2)))
    (finding,) = different(RIGHT, serial, "then")
    assert finding.message == "node 1 (shrink) depends on node 0 (base) only then"


def test_memory_of_the_pool_may_lie_elsewhere_in_each_graph() -> None:
    base = kernel("base", reads(X), writes(7))
    expand = kernel("expand", reads(SHRUNK), reads(7), writes(7))
    graph = replace(RIGHT, nodes=(base, SHRINK, expand), own=frozenset({7}))
    assert flaws(different(RIGHT, graph, "then")) == []
    swapped = kernel("expand", reads(SHRUNK), reads(7), writes(8))
    graph = replace(RIGHT, nodes=(base, SHRINK, swapped), own=frozenset({7, 8}))
    assert flaws(different(RIGHT, graph, "then")) == [Flaw.DIFFERENT]


def captured(
    *operations: Operation, grids: Mapping[int, tuple[int, ...]] | None = None
) -> Inventory:
    nothing: Sequence[int] = ()
    return inventory_of(
        operations, MAIN, grids=grids or {}, own=nothing, alive=nothing, block_names={}
    )


def test_a_recorded_fork_and_join_has_the_edges_of_its_events() -> None:
    graph = captured(
        Launch(MAIN, "before"),
        Record(1, MAIN),
        Wait(1, SIDE),
        Launch(SIDE, "shrink", (writes(SHRUNK),)),
        Record(2, SIDE),
        Launch(MAIN, "base"),
        Launch(HOST, "host"),
        Wait(2, MAIN),
        Launch(MAIN, "expand", (reads(SHRUNK),)),
        grids={3: (2, 1)},
    )
    assert [node.name for node in graph.nodes] == ["before", "shrink", "base", "expand"]
    assert graph.nodes[1].grid == (2, 1)
    assert set(graph.edges) == {Edge(0, 1), Edge(0, 2), Edge(1, 3), Edge(2, 3)}
    assert graph.ends == {3}


def test_a_side_that_is_not_joined_is_found_in_a_recorded_capture() -> None:
    graph = captured(
        Record(1, MAIN),
        Wait(1, SIDE),
        Launch(SIDE, "shrink", (writes(SHRUNK),)),
        Launch(MAIN, "expand", (reads(SHRUNK),)),
    )
    assert flaws(unjoined(graph)) == [Flaw.UNJOINED]
    assert flaws(unordered(graph)) == [Flaw.UNORDERED]


def test_an_event_stands_for_what_its_stream_had_when_it_was_recorded() -> None:
    graph = captured(
        Launch(SIDE, "shrink", (writes(SHRUNK),)),
        Record(2, SIDE),
        Launch(MAIN, "base"),
        Record(1, MAIN),
        Wait(2, MAIN),
        Wait(1, 3),
        Launch(3, "other"),
        Launch(MAIN, "expand", (reads(SHRUNK),)),
    )
    assert set(graph.edges) == {Edge(1, 2), Edge(0, 3), Edge(1, 3)}


def test_an_event_from_before_the_capture_is_no_edge() -> None:
    graph = captured(Wait(5, MAIN), Launch(MAIN, "copy_"), Launch(MAIN, "zero_"))
    assert graph.edges == (Edge(0, 1),)
    assert [node.kind for node in graph.nodes] == [NodeKind.MEMCPY, NodeKind.MEMSET]


streams, events = st.sampled_from((MAIN, SIDE, 3)), st.sampled_from((1, 2))
operations = st.lists(
    st.one_of(
        st.builds(Launch, streams, st.just("k"), st.just((writes(X),))),
        st.builds(Record, events, streams),
        st.builds(Wait, events, streams),
    ),
    max_size=14,
)


@given(operations)
def test_edges_order_what_the_clocks_of_the_trace_order(found: list[Operation]) -> None:
    graph = captured(*found)
    clocks = Clocks(Trace(tuple(found)))
    launches = [i for i, op in enumerate(found) if isinstance(op, Launch)]
    pairs = [(i, j) for i in launches for j in launches if i < j]
    open_pairs = sum(not clocks.ordered(i, j) for i, j in pairs)
    assert len(list(unordered(graph))) == open_pairs
