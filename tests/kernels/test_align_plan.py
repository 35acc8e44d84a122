"""How much memory the alignment of token-expert pairs takes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lorakernels.moe.tiles import Alignment, plan_alignment, scratch_size
from lorakernels.runtime.tuning import DEFAULT, Tuning

GIB = 1 << 30
# 8192 buckets, the most that a program counts
EXPERTS, SLOTS = 128, 63


@pytest.mark.parametrize("num_pairs", [2_000_000, 3_000_000, 16_000_000])
def test_a_huge_batch_takes_less_than_a_gigabyte_of_scratch_memory(num_pairs: int) -> None:
    assert 4 * scratch_size(num_pairs, EXPERTS, SLOTS, True) < GIB


def test_only_a_huge_batch_of_few_buckets_is_sorted_by_launches() -> None:
    assert plan_alignment(1_000_000, EXPERTS, SLOTS, True) is Alignment.COUNTED
    assert plan_alignment(16_000_000, EXPERTS, SLOTS, True) is Alignment.SORTED
    few = DEFAULT.align.compared_pairs
    assert plan_alignment(few, EXPERTS, 2 * SLOTS, True) is Alignment.COMPARED
    assert plan_alignment(few + 1, EXPERTS, 2 * SLOTS, True) is Alignment.SORTED


@pytest.mark.parametrize("experts", [1, 8, 512])
def test_one_program_sorts_few_pairs_more_are_compared_and_many_are_counted(experts: int) -> None:
    align = DEFAULT.align

    def way(num_pairs: int) -> Alignment:
        return plan_alignment(num_pairs, experts, 4, False)

    assert way(0) is way(1) is way(align.pairs_at_once) is Alignment.SORTED_AT_ONCE
    assert way(align.pairs_at_once + 1) is way(align.compared_pairs) is Alignment.COMPARED
    assert way(align.compared_pairs + 1) is Alignment.COUNTED


def test_pairs_whose_keys_do_not_fit_are_sorted_by_launches() -> None:
    # 2 ** 20 buckets of each expert: a key has a bucket and one of 64, or of 128 pairs
    slots = 1 << 20
    assert plan_alignment(64, 16, slots, False) is Alignment.SORTED_AT_ONCE
    assert plan_alignment(64, 32, slots, False) is Alignment.SORTED
    assert plan_alignment(65, 16, slots, False) is Alignment.SORTED
    # of 512, or of 1024 pairs
    assert plan_alignment(512, 16, slots // 8, False) is Alignment.COMPARED
    assert plan_alignment(513, 16, slots // 8, False) is Alignment.SORTED


# 64 buckets; small constants, so that batches of every kind are small
@pytest.mark.parametrize(
    "tuning",
    [
        replace(DEFAULT, align=replace(DEFAULT.align, **{"pairs_at_once": 20} | changed))
        for changed in (
            {"compared_pairs": 40, "span": 32, "most_counters": 1000},
            {"compared_pairs": 0, "span": 8, "most_counters": 6000},
            {"compared_pairs": 40, "span": 32, "most_bins": 32},
            {"compared_pairs": 600, "span": 1024},
            {"compared_pairs": 2000},
        )
    ],
)
def test_the_scratch_memory_of_large_batches_is_enough_for_smaller_ones(tuning: Tuning) -> None:
    sizes = (5, 3, True)
    needed = [_needed(n, plan_alignment(n, *sizes, tuning), tuning) for n in range(1, 1001)]
    for most in range(1, 1001):
        assert max(needed[:most]) <= scratch_size(most, *sizes, tuning)


def _needed(num_pairs: int, way: Alignment, tuning: Tuning) -> int:
    """Elements that the launches use of a step of 16 * 4 buckets."""
    spans = -(-num_pairs // tuning.align.span)
    if way is Alignment.SORTED:
        # keys and pairs, each twice, and counts of a digit of 16 values
        return 4 * -(-num_pairs // 64) * 64 + (spans + 1) * 16
    if way is Alignment.COMPARED:
        return num_pairs
    return (spans + 4) * 64 if way is Alignment.COUNTED else 0
