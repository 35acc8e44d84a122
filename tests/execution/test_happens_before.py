"""Clocks, conflicts and legal orders against plain searches over all paths."""

from __future__ import annotations

from itertools import count, pairwise, permutations

from hypothesis import given, settings
from hypothesis import strategies as st

from loragate.execution.trace.clocks import Clocks
from loragate.execution.trace.conflicts import Hazard, conflicts, explained
from loragate.execution.trace.operations import (
    HOST,
    Access,
    Free,
    Launch,
    Operation,
    Record,
    Sync,
    Trace,
    Wait,
)
from loragate.execution.trace.orders import How, Kind, legal_orders
from loragate.execution.trace.overlap import overlapping
from loragate.execution.trace.replays import launched
from loragate.execution.trace.spans import first_common, merged, strided

STREAMS, EVENTS, BLOCKS = (0, 1, 2), (0, 1), (0, 1)
streams, events = st.sampled_from(STREAMS), st.sampled_from(EVENTS)
span = st.tuples(st.integers(0, 9), st.integers(0, 9))
spans = st.lists(span, max_size=4).map(merged)
accesses = st.builds(Access, st.sampled_from(BLOCKS), spans, st.booleans())
launches = st.builds(
    Launch,
    st.sampled_from((*STREAMS, HOST)),
    st.just("kernel"),
    st.lists(accesses, max_size=2).map(tuple),
)
operations = st.one_of(
    launches,
    launches,
    st.builds(Record, events, streams),
    st.builds(Wait, events, streams),
    st.builds(Sync, st.one_of(st.none(), streams), st.one_of(st.none(), events)),
    st.builds(
        Free, st.sampled_from(BLOCKS), streams, st.just(10), st.frozensets(streams, max_size=1)
    ),
)
traces = st.lists(operations, max_size=14).map(lambda ops: Trace(tuple(ops)))


def paths(trace: Trace) -> set[tuple[int, int]]:
    """All pairs of operations with a path between them: the rules of CUDA as edges."""
    edges = set[tuple[int, int]]()
    tails: dict[int, int] = {}
    records: dict[int, int] = {}
    for j, op in enumerate(trace.operations):
        before: list[int | None]
        if isinstance(op, Sync):
            if op.event is not None:
                before = [records.get(op.event)]
            elif op.stream is not None:
                before = [tails.get(op.stream)]
            else:
                before = list(tails.values())
            before.append(tails.get(HOST))
            tails[HOST] = j
        elif isinstance(op, Free):
            before = [tails.get(s) for s in (HOST, op.stream, *op.used_by)]
        else:
            before = [tails.get(HOST), tails.get(op.stream)]
            if isinstance(op, Wait):
                before.append(records.get(op.event))
            if isinstance(op, Record):
                records[op.event] = j
            tails[op.stream] = j
        edges |= {(i, j) for i in before if i is not None}
    for middle in range(len(trace.operations)):
        for i, a in list(edges):
            if a == middle:
                edges |= {(i, j) for b, j in list(edges) if b == middle}
    return edges


def bytes_of(access: Access) -> set[int]:
    return {byte for start, stop in access.spans for byte in range(start, stop)}


def brute_conflicts(trace: Trace) -> set[tuple[int, int, int]]:
    reached = paths(trace)
    found = set()
    touched = []
    for index, op in enumerate(trace.operations):
        if isinstance(op, Launch):
            touched += [(index, access) for access in op.accesses]
        elif isinstance(op, Free):
            touched.append((index, Access(op.block, ((0, op.size),), True)))
    for i, one in touched:
        for j, other in touched:
            if i < j and one.block == other.block and (one.is_write or other.is_write):
                is_free = isinstance(trace.operations[i], Free)
                unordered = is_free or (i, j) not in reached
                if unordered and bytes_of(one) & bytes_of(other):
                    found.add((i, j, one.block))
    return found


@settings(max_examples=400)
@given(traces)
def test_two_launches_are_ordered_if_and_only_if_a_path_leads_from_one_to_the_other(
    trace: Trace,
) -> None:
    clocks, reached = Clocks(trace), paths(trace)
    for j, later in enumerate(trace.operations):
        for i in range(j):
            if isinstance(trace.operations[i], Launch) and isinstance(later, (Launch, Free)):
                assert clocks.ordered(i, j) == ((i, j) in reached), (i, j)


def test_a_wait_is_for_the_last_record_of_an_event_alone() -> None:
    first, second = Launch(0, "a"), Launch(1, "b")
    recorded_twice = Trace((first, Record(0, 0), second, Record(0, 1), Wait(0, 2), Launch(2, "c")))
    clocks = Clocks(recorded_twice)
    assert not clocks.ordered(0, 5)
    assert clocks.ordered(2, 5)


@settings(max_examples=400)
@given(traces)
def test_exactly_the_unordered_pairs_that_share_a_written_byte_conflict(trace: Trace) -> None:
    assert {(c.first, c.second, c.block) for c in conflicts(trace)} == brute_conflicts(trace)


@settings(max_examples=60)
@given(st.lists(operations, max_size=9).map(lambda ops: Trace(tuple(ops))))
def test_all_legal_orders_of_a_short_trace_are_found(trace: Trace) -> None:
    launched = [i for i, op in enumerate(trace.operations) if isinstance(op, Launch)][:6]
    if len(launched) < sum(isinstance(op, Launch) for op in trace.operations):
        return
    reached = paths(trace)
    wanted = {
        order
        for order in permutations(launched)
        if not any((b, a) in reached for k, a in enumerate(order) for b in order[k + 1 :])
    }
    orders = list(legal_orders(trace, limit=720, seed=0))
    assert set(orders) == wanted
    assert len(orders) == len(wanted)
    assert orders[0] == tuple(launched)


def alternating(count: int) -> Trace:
    return Trace(tuple(Launch(index % 2, "kernel") for index in range(count)))


def test_a_stream_is_held_back_at_every_place_where_the_order_of_streams_is_decided() -> None:
    trace = Trace(
        (
            Launch(0, "0"),
            Launch(0, "1"),
            Record(0, 0),
            Launch(1, "3"),
            Launch(1, "4"),
            Wait(0, 1),
            Launch(1, "6"),
            Launch(0, "7"),
            Launch(0, "8"),
        )
    )
    orders = legal_orders(trace, limit=9, seed=0)
    cuts = {how.number: order for order, how in orders.items() if how.kind is Kind.CUT}
    assert cuts == {
        0: (3, 4, 0, 1, 6, 7, 8),
        3: (0, 1, 7, 8, 3, 4, 6),
        6: (0, 1, 3, 4, 7, 8, 6),
    }
    # holding back 7 on stream 0 gives the order of the host
    assert next(iter(orders.items())) == ((0, 1, 3, 4, 6, 7, 8), How(Kind.HOST, 0))


def test_draws_follow_from_the_seed_and_their_numbers() -> None:
    trace = alternating(24)
    few, more, other = (
        legal_orders(trace, limit=limit, seed=seed) for limit, seed in ((30, 3), (40, 3), (40, 4))
    )
    assert [how.kind for how in few.values()].count(Kind.CUT) == 23
    assert len(few) == 30
    # a draw is the same whatever was drawn before it
    assert list(more.items())[:30] == list(few.items())
    assert {order for order, how in more.items() if how.kind is Kind.DRAW}.isdisjoint(
        order for order, how in other.items() if how.kind is Kind.DRAW
    )


def test_of_too_many_cuts_some_are_drawn_from_the_seed() -> None:
    drawn = [legal_orders(alternating(24), limit=12, seed=seed) for seed in (3, 3, 4)]
    kinds = [how.kind for how in drawn[0].values()]
    assert kinds == [Kind.HOST, *[Kind.CUT] * 11]
    assert drawn[0] == drawn[1]
    assert drawn[0] != drawn[2]


def hazards(*ops: Operation) -> list[Hazard]:
    return [conflict.hazard for conflict in conflicts(Trace(ops))]


READ, WRITE = Access(0, ((0, 8),), False, "x"), Access(0, ((4, 12),), True, "y")


def test_each_kind_of_hazard_has_its_name() -> None:
    assert hazards(Launch(0, "a", (WRITE,)), Launch(1, "b", (READ,))) == [Hazard.READ_AFTER_WRITE]
    assert hazards(Launch(0, "a", (READ,)), Launch(1, "b", (WRITE,))) == [Hazard.WRITE_AFTER_READ]
    assert hazards(Launch(0, "a", (WRITE,)), Launch(1, "b", (WRITE,))) == [Hazard.WRITE_AFTER_WRITE]
    assert hazards(Launch(1, "a", (READ,)), Free(0, 0, 12)) == [Hazard.USE_AFTER_FREE]
    assert hazards(Launch(0, "copy", (READ,)), Launch(HOST, "w", (WRITE,))) == [Hazard.HOST_ACCESS]


def test_a_host_write_after_waiting_for_the_copy_is_no_hazard() -> None:
    copy, write = Launch(0, "copy", (READ,)), Launch(HOST, "write", (WRITE,))
    assert not hazards(copy, Sync(stream=0), write)
    assert not hazards(copy, Record(5, 0), Sync(event=5), write)
    assert hazards(Record(5, 0), copy, Sync(event=5), write) == [Hazard.HOST_ACCESS]


def test_a_replay_waits_for_events_of_its_capture_and_for_none_from_before() -> None:
    captured = Wait(7, 1), Launch(1, "first"), Record(5, 1), Wait(5, 2), Launch(2, "second")
    repeated, streams = launched(captured, 0, count(100))
    own = {captured_on: number for number, captured_on in streams.items()}
    ops = [op for op, _ in repeated]
    fork, records = ops[0], {op.event: op.stream for op in ops if isinstance(op, Record)}
    assert isinstance(fork, Record)
    waits = {(op.event, op.stream) for op in ops if isinstance(op, Wait) and op.stream != 0}
    (joined,) = (event for event, stream in waits if event != fork.event)
    assert waits == {(fork.event, own[1]), (fork.event, own[2]), (joined, own[2])}
    assert records[joined] == own[1]


def test_a_wait_for_an_event_that_was_never_recorded_orders_nothing() -> None:
    first, second = Launch(0, "a", (WRITE,)), Launch(1, "b", (READ,))
    assert hazards(first, Wait(7, 1), second, Record(7, 0))
    assert Clocks(Trace((first, Wait(7, 1), second))).idle_waits == [1]
    assert not hazards(first, Record(7, 0), Wait(7, 1), second)


def test_a_wait_means_the_most_recent_record_at_its_time() -> None:
    early, late = Launch(0, "early"), Launch(0, "late", (WRITE,))
    reader = Launch(1, "reader", (READ,))
    # recorded again after the write, and before the wait
    assert not hazards(early, Record(7, 0), late, Record(7, 0), Wait(7, 1), reader)
    # recorded again after the wait: the wait means the earlier record
    assert hazards(early, Record(7, 0), Wait(7, 1), late, Record(7, 0), reader)


def test_memory_that_record_stream_keeps_is_free_after_the_work_of_that_stream() -> None:
    use = Launch(1, "side", (READ,))
    assert not hazards(use, Free(0, 0, 12, frozenset({1})))
    assert hazards(use, Free(0, 0, 12, frozenset({2}))) == [Hazard.USE_AFTER_FREE]
    # its own stream may reuse it at once
    assert not hazards(use, Free(0, 1, 12))


def test_a_report_names_tensor_bytes_streams_and_both_stacks() -> None:
    stacks = [((f"layer{k}.py", 10 + k, f"step{k}"),) for k in range(2)]
    trace = Trace(
        (Launch(0, "expand", (WRITE,), stacks[0]), Launch(1, "add", (READ,), stacks[1])),
        {0: "delta"},
        {0: "main", 1: "side"},
    )
    text = explained(trace, conflicts(trace)[0])
    for part in ("bytes 4 to 8 of delta", "#0 expand on main", "#1 add on side"):
        assert part in text
    assert "layer0.py:10 in step0" in text
    assert "layer1.py:11 in step1" in text


@given(
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 7)), min_size=1, max_size=3),
    st.integers(0, 5),
    st.sampled_from((1, 2)),
)
def test_the_bytes_of_a_strided_view_are_exactly_those_of_its_elements(
    dims: list[tuple[int, int]], offset: int, item: int
) -> None:
    elements = {offset}
    for size, stride in dims:
        elements = {e + step * stride for e in elements for step in range(size)}
    wanted = {e * item + byte for e in elements for byte in range(item)}
    found = strided([d[0] for d in dims], [d[1] for d in dims], offset, item)
    assert {byte for start, stop in found for byte in range(start, stop)} == wanted


@given(st.lists(span, max_size=6))
def test_a_union_has_the_bytes_of_its_spans_and_no_two_that_touch(
    given_spans: list[tuple[int, int]],
) -> None:
    union = merged(given_spans)
    held = [byte for start, stop in union for byte in range(start, stop)]
    assert held == sorted({byte for start, stop in given_spans for byte in range(start, stop)})
    assert all(one[1] < other[0] for one, other in pairwise(union))


def test_work_overlaps_where_launches_that_read_something_have_no_order() -> None:
    def launch(stream: int, *is_write: bool) -> Launch:
        return Launch(stream, "kernel", tuple(Access(0, ((0, 4),), write) for write in is_write))

    fill, add, copy = launch(1, True), launch(1, False, True), launch(2, False)
    assert overlapping(Trace((launch(0, False), fill, copy)), 0, 3) == [(0, 2)]
    assert overlapping(Trace((launch(0, False), add, copy)), 0, 2) == [(0, 1)]


@given(spans, spans)
def test_the_first_common_bytes_are_common(one: tuple[tuple[int, int], ...], other: object) -> None:
    assert isinstance(other, tuple)
    common = bytes_of(Access(0, one, True)) & bytes_of(Access(0, other, True))
    found = first_common(one, other)
    assert (found is None) == (not common)
    assert found is None or (min(common) == found[0] and set(range(*found)) <= common)
