from __future__ import annotations

from collections import Counter
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from loragate.bench.timer import _balanced_orders, _turns


@given(st.integers(1, 12))
def test_each_graph_comes_behind_each_other_one_equally_often(count: int) -> None:
    orders = _balanced_orders(count)
    assert all(sorted(order) == list(range(count)) for order in orders)
    behind = Counter(pair for order in orders for pair in pairwise(order))
    assert len(behind) == count * (count - 1)
    assert len(set(behind.values())) <= 1


@given(st.integers(1, 9), st.integers(1, 40))
def test_graphs_are_replayed_once_a_round(count: int, rounds: int) -> None:
    names = [f"graph {place}" for place in range(count)]
    turns = list(_turns(names, rounds))
    assert len(turns) == count * rounds
    for start in range(0, len(turns), count):
        assert sorted(turns[start : start + count]) == names
