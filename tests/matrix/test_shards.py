from __future__ import annotations

import argparse

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loragate.matrix.patterns import SelectionError
from loragate.matrix.shards import Durations, Shard, deal, shard_numbers

NAMES = [f"s.case-{number:02}" for number in range(20)]


@given(
    weights=st.dictionaries(st.text(max_size=4), st.floats(0, 1e4), max_size=30),
    count=st.integers(1, 6),
)
def test_every_name_is_in_exactly_one_part_and_no_part_is_longer_by_more_than_one_name(
    weights: dict[str, float], count: int
) -> None:
    parts = deal(weights, count)
    assert sorted(name for part in parts for name in part) == sorted(weights)
    totals = [sum(weights[name] for name in part) for part in parts]
    assert max(totals) - min(totals) <= max(weights.values(), default=0.0) * (1 + 1e-9) + 1e-9


def test_the_parts_do_not_depend_on_the_order_of_the_names() -> None:
    weights = {name: float(len(name) * number % 7) for number, name in enumerate(NAMES)}
    backwards = dict(reversed(weights.items()))
    assert deal(weights, 3) == deal(backwards, 3)


def test_recorded_durations_decide_and_a_new_case_counts_as_a_usual_one() -> None:
    recorded = Durations({"long": 20.0, "a": 10.0, "b": 10.0, "c": 5.0})
    shard = Shard(index=1, count=2, durations=recorded)
    # "new" counts 10, the median
    parts = shard.parts(["long", "a", "b", "c", "new"])
    assert parts == ({"long", "new"}, {"a", "b", "c"})


def test_without_durations_the_parts_are_of_equal_size() -> None:
    parts = Shard(index=1, count=3).parts(NAMES)
    assert [len(part) for part in parts] == [7, 7, 6]
    assert Shard(index=2, count=3).part(NAMES) == parts[1]


def test_cases_that_take_no_time_are_spread_as_well() -> None:
    durations = Durations(dict.fromkeys(NAMES, 0.0))
    assert [len(p) for p in Shard(index=1, count=4, durations=durations).parts(NAMES)] == [5] * 4


def test_a_shard_without_a_case_is_refused() -> None:
    with pytest.raises(SelectionError, match="shard 2/2 has no case: 1 case selected; use fewer"):
        Shard(index=2, count=2).part(["s.only"])


def test_each_leg_runs_in_one_shard_and_its_time_counts_against_the_cases_of_that_shard() -> None:
    durations = Durations(dict.fromkeys(NAMES, 1.0), {"host": 8.0, "compile": 2.0})
    shard = Shard(index=1, count=2, durations=durations, of_gate=True)
    legs = shard.leg_parts(("compile", "host", "findings"))
    assert legs == (("host", "findings"), ("compile",))
    assert [len(part) for part in shard.parts(NAMES)] == [7, 13]
    # a session of pytest has no other legs
    alone = Shard(index=1, count=2, durations=durations)
    assert [len(part) for part in alone.parts(NAMES)] == [10, 10]


def test_legs_without_a_record_are_dealt_in_turns() -> None:
    legs = Shard(index=1, count=2).leg_parts(("compile", "host", "findings"))
    assert legs == (("compile", "findings"), ("host",))


@pytest.mark.parametrize("text", ["0/2", "3/2", "1", "a/b", "1/2/3", "-1/2", "1/0"])
def test_what_is_no_shard_is_refused_with_what_is_allowed(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="must be I/N with 1 <= I <= N"):
        shard_numbers(text)
    assert shard_numbers("2/4") == (2, 4)
