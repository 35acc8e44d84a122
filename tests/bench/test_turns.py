from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from loragate.bench import timer
from loragate.bench.timer import CALLS_PER_GRAPH, REPLAYS, _balanced_orders, _turns


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


class Graph:
    """Notes its replays in a list that all graphs share."""

    def __init__(self, name: str, us: list[float], replayed: list[str]) -> None:
        self.name, self.us, self._replayed = name, us, replayed

    def replay(self) -> None:
        self._replayed.append(self.name)


class Span:
    """In place of two events around a launch, with the times of a graph one after the other."""

    def __init__(self, launch: Any) -> None:
        launch()
        self.microseconds = launch.__self__.us.pop(0)


@pytest.mark.parametrize("count", range(1, 6))
def test_graphs_are_replayed_at_least_so_often_and_in_balance(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(timer, "_Span", Span)
    replayed: list[str] = []
    graphs: Any = {n: Graph(str(n), [1.0] * 99, replayed) for n in range(count)}
    timer.replay_in_turns(graphs, warm_ups=0)
    rounds, rest = divmod(len(replayed), count)
    assert rest == 0
    assert rounds >= REPLAYS
    # each comes behind each other one within a round equally often
    turns = [replayed[start : start + count] for start in range(0, len(replayed), count)]
    behind = Counter(pair for turn in turns for pair in pairwise(turn))
    assert len(set(behind.values())) <= 1


def test_the_time_of_a_call_is_the_median_replay_over_the_calls_of_a_graph(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(timer, "_Span", Span)
    graph: Any = Graph("one", [90.0, 10.0, 40.0], [])
    found = timer.replay_in_turns({"one": graph}, replays=3, warm_ups=2)
    assert found == {"one": 40.0 / CALLS_PER_GRAPH}
