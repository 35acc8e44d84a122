"""How much memory the alignment of token-expert pairs takes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lorakernels.moe.tiles import is_sorted, scratch_size
from lorakernels.runtime.tuning import DEFAULT, Tuning

GIB = 1 << 30
# 8192 buckets, the most that a program counts
EXPERTS, SLOTS = 128, 63


@pytest.mark.parametrize("num_pairs", [2_000_000, 3_000_000, 16_000_000])
def test_a_huge_batch_takes_less_than_a_gigabyte_of_scratch_memory(num_pairs: int) -> None:
    assert 4 * scratch_size(num_pairs, EXPERTS, SLOTS, True) < GIB


def test_only_a_huge_batch_of_few_buckets_is_sorted() -> None:
    assert not is_sorted(1_000_000, EXPERTS, SLOTS, True)
    assert is_sorted(16_000_000, EXPERTS, SLOTS, True)
    assert is_sorted(1, EXPERTS, 2 * SLOTS, True)


# 64 buckets; small constants, so that batches of every kind are small
@pytest.mark.parametrize(
    "tuning",
    [
        replace(DEFAULT, align=replace(DEFAULT.align, **changed))
        for changed in (
            {"single_launch_pairs": 40, "span": 32, "most_counters": 1000},
            {"single_launch_pairs": 0, "span": 8, "most_counters": 6000},
            {"single_launch_pairs": 40, "span": 32, "most_bins": 32},
            {"single_launch_pairs": 600, "span": 16},
        )
    ],
)
def test_the_scratch_memory_of_large_batches_is_enough_for_smaller_ones(tuning: Tuning) -> None:
    sizes = (5, 3, True)
    needed = [_needed(n, is_sorted(n, *sizes, tuning), tuning) for n in range(1, 1001)]
    for most in range(1, 1001):
        assert max(needed[:most]) <= scratch_size(most, *sizes, tuning)


def _needed(num_pairs: int, sorts: bool, tuning: Tuning) -> int:
    """Elements that the launches use of a step of 16 * 4 buckets."""
    spans = -(-num_pairs // tuning.align.span)
    if sorts:
        # keys and pairs, each twice, and counts of a digit of 16 values
        return 4 * -(-num_pairs // 64) * 64 + (spans + 1) * 16
    return (spans + 4) * 64 if num_pairs > tuning.align.single_launch_pairs else 0
