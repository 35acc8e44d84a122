"""What the plans of a linear layer take from tables and workspaces."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from loragate.core.machine import select_interpreter

select_interpreter()

from lorakernels.dense.launch import TileTables  # noqa: E402
from lorakernels.dense.shape import DenseShape  # noqa: E402
from lorakernels.dense.sizes import largest_shrunk, plan_shrunk  # noqa: E402
from lorakernels.runtime.tuning import DEFAULT, DenseTuning  # noqa: E402

SLOTS = 4


@pytest.mark.parametrize(
    ("slots", "rows", "height", "tiles"),
    [(10, 100, 16, 6), (10, 96, 16, 6), (5, 100, 16, 5), (10, 100, 128, 0)],
)
def test_a_tile_that_the_tables_hold_in_part_is_none(
    slots: int, rows: int, height: int, tiles: int
) -> None:
    tables = TileTables(torch.zeros(slots), torch.zeros(rows), torch.zeros(1))
    assert tables.capacity(height) == tiles


# 706 and 1026: a smaller batch with several partials needs most
@pytest.mark.parametrize("most", [1, 17, 706, 1026, 2500])
@pytest.mark.parametrize(
    ("in_features", "widths", "rank"),
    [
        (4096, (4096, 1024, 1024), 16),
        (14336, (4096,), 8),
        (1000, (520, 72), 64),
        (512, (64,), 320),
        (4096, (28672,), 128),
        (14336, (4096,), 200),
    ],
)
def test_no_batch_needs_more_values_than_the_largest_that_is_planned_for(
    in_features: int, widths: tuple[int, ...], rank: int, most: int
) -> None:
    shape = DenseShape(most, in_features, widths, rank, 2)
    needed = {
        rows: math.prod(plan_shrunk(replace(shape, num_rows=rows), SLOTS))
        for rows in range(1, most + 1)
    }
    assert largest_shrunk(shape, SLOTS, most) == max(needed.values())


@given(
    most=st.integers(1, 140),
    in_features=st.sampled_from((64, 257, 512, 2048, 8192, 14336)),
    widths=st.sampled_from(((64,), (512, 256), (4096, 1024, 1024), (28672, 28672))),
    rank=st.integers(1, 512),
    slots=st.integers(1, 40),
    beside=st.booleans(),
)
@example(most=112, in_features=5120, widths=(25600, 25600), rank=16, slots=4, beside=True)
# three rows need more than ten, which have fewer partials
@example(most=10, in_features=14336, widths=(512, 256), rank=64, slots=5, beside=True)
def test_no_batch_of_few_rows_needs_more_than_is_planned_for(
    most: int, in_features: int, widths: tuple[int, ...], rank: int, slots: int, beside: bool
) -> None:
    shape = DenseShape(most, in_features, widths, rank, 2, beside=beside)
    needed = max(
        math.prod(plan_shrunk(replace(shape, num_rows=rows), slots)) for rows in range(1, most + 1)
    )
    assert largest_shrunk(shape, slots, most) == needed
    # a workspace is not told which forms its batches take
    assert needed <= largest_shrunk(replace(shape, beside=False), slots, most)


def with_constants(
    programs: int, multiprocessors: int, heights: tuple[int, int, int], usual_slots: int
) -> DenseTuning:
    """heights: most rows of a batch whose tiles have 16, 32 and 64 rows."""
    of_16, of_32, of_64 = heights
    return replace(
        DEFAULT.dense,
        programs=programs,
        multiprocessors=multiprocessors,
        rows_of_height_16=of_16,
        rows_of_height_32=of_32,
        rows_of_height_64=of_64,
        usual_slots=usual_slots,
    )


@pytest.mark.parametrize(
    ("most", "slots", "shape", "constants"),
    [
        # each needs most for a size of another group of those that are planned for
        pytest.param(
            143,
            32,
            DenseShape(0, 8192, (28672, 28672), 32, 2),
            with_constants(2, 132, (4, 16, 150), 1),
            id="the last rows of several partials",
        ),
        pytest.param(
            131,
            64,
            DenseShape(0, 2048, (4096, 1024, 1024), 64, 4),
            with_constants(1, 66, (16, 16, 150), 4),
            id="all rows",
        ),
        pytest.param(
            13,
            1,
            DenseShape(0, 5120, (6144, 6144), 24, 4, beside=True),
            with_constants(432, 108, (32, 64, 1023), 8),
            id="more rows than slots",
        ),
        pytest.param(
            22,
            160,
            DenseShape(0, 14336, (4096,), 24, 4, beside=True),
            with_constants(528, 66, (1, 1, 80), 64),
            id="more slots than rows of tiles of 32",
        ),
        pytest.param(
            21,
            1,
            DenseShape(0, 8192, (512, 256), 48, 2),
            with_constants(132, 132, (1, 4, 100), 4),
            id="rows of tiles of 32",
        ),
        pytest.param(
            39,
            8,
            DenseShape(0, 2048, (12288,), 96, 2, beside=True),
            with_constants(132, 132, (4, 8, 80), 4),
            id="the last few rows",
        ),
        pytest.param(
            80,
            9,
            DenseShape(0, 5120, (4096,), 8, 2),
            with_constants(132, 66, (8, 9, 80), 64),
            id="an odd number of slots",
        ),
    ],
)
def test_no_batch_needs_more_than_is_planned_for_with_the_constants_of_another_device(
    most: int, slots: int, shape: DenseShape, constants: DenseTuning
) -> None:
    shape = replace(shape, tuning=replace(DEFAULT, dense=constants))
    needed = {
        rows: math.prod(plan_shrunk(replace(shape, num_rows=rows), slots))
        for rows in range(1, most + 1)
    }
    assert largest_shrunk(shape, slots, most) == max(needed.values())


@pytest.mark.parametrize("most", [1, 40, 300])
def test_copies_of_the_sum_are_planned_for_beside_the_partials_of_each_batch(most: int) -> None:
    shape = DenseShape(0, 8192, (4096,), 64, 2)
    plans = [plan_shrunk(replace(shape, num_rows=rows), SLOTS) for rows in range(1, most + 1)]
    for copies in (0, 1, 5):
        needed = max((splits + copies) * rows * ranks for splits, rows, ranks in plans)
        assert largest_shrunk(shape, SLOTS, most, copies) == needed
