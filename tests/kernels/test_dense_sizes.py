"""What the plans of a linear layer take from tables and workspaces."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from loragate.core.machine import select_interpreter

select_interpreter()

from lorakernels.dense.launch import TileTables  # noqa: E402
from lorakernels.dense.plan import DenseShape, largest_shrunk, plan_shrunk  # noqa: E402

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
    [(4096, (4096, 1024, 1024), 16), (14336, (4096,), 8), (1000, (520, 72), 64), (512, (64,), 320)],
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
