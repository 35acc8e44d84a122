"""Arithmetic on sizes, for all small ones."""

from __future__ import annotations

import pytest

from lorakernels.common.sizes import power_of_2, power_of_2_below, rank_vector


@pytest.mark.parametrize("value", range(-1, 70))
def test_powers_of_two_enclose_a_size(value: int) -> None:
    above, below = power_of_2(value), power_of_2_below(value)
    assert above.bit_count() == below.bit_count() == 1
    if value < 1:
        assert (above, below) == (1, 1)
    else:
        assert above // 2 < value <= above
        assert below <= value < 2 * below


@pytest.mark.parametrize("rank", range(1, 70))
def test_vectors_of_ranks_divide_the_rank_and_are_as_wide_as_they_may_be(rank: int) -> None:
    vector = rank_vector(rank)
    assert rank % vector == 0
    assert vector == max(width for width in (1, 2, 4, 8, 16) if rank % width == 0)
