"""No shape asks for a larger grid than CUDA launches."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch

from lorakernels.batch import metadata
from lorakernels.batch.metadata import BatchMetadata
from lorakernels.dense import launch
from lorakernels.dense.launch import TileTables, launch_add, launch_expand, launch_shrink
from lorakernels.dense.ops import shape_of_batch, shrunk_shape
from lorakernels.dense.weights import SlotWeights

# blocks of a grid along x, y and z
LIMITS = (2**31 - 1, 65535, 65535)
ROWS = (1, 129, 2047, 2_100_000, 2_200_000, 4_300_000, 100_000_000)
# one wide slice, and many narrow ones
WIDTHS = ((152_064,), (16,) * 64)
RANKS = (1, 512)
DTYPES = (torch.float32, torch.bfloat16)


class Grids:
    """Stands for a kernel and keeps the grids that it is launched with."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        self.seen.append(grid)
        return self.launched

    def launched(self, *args: Any, **options: Any) -> None:
        pass


@pytest.fixture
def grids(monkeypatch: pytest.MonkeyPatch) -> Grids:
    seen = Grids()
    monkeypatch.setattr(metadata, "prepare_kernel", seen)
    monkeypatch.setattr(launch, "lora_shrink_kernel", seen)
    monkeypatch.setattr(launch, "lora_expand_kernel", seen)
    monkeypatch.setattr(launch, "lora_add_kernel", seen)
    return seen


def test_nothing_is_launched_for_a_batch_without_rows(grids: Grids) -> None:
    # a grid of no programs is an error of CUDA
    weights = SlotWeights(
        num_slots=1, slice_widths=(16,), in_features=16, rank=1, dtype=torch.float32, device="meta"
    )
    batch = BatchMetadata(max_tokens=1, max_slots=1, device="meta")
    shape, tiles = shape_of_batch(0, weights), TileTables.of(batch)
    x, shrunk = torch.empty(0, 16, device="meta"), torch.empty(1, 0, 1, device="meta")
    launch_shrink(x, weights.tensors, shape, tiles, shrunk, pdl=False)
    launch_expand(shrunk, weights.tensors, shape, tiles, x, pdl=False)
    launch_add(x, shape, tiles, x, pdl=False)
    assert grids.seen == []


@pytest.mark.parametrize("rows", ROWS)
def test_every_axis_of_every_dense_grid_can_be_launched(grids: Grids, rows: int) -> None:
    batch = BatchMetadata(max_tokens=rows, max_slots=2048, device="meta")
    batch.prepare(torch.empty(rows, dtype=torch.int32, device="meta"))
    launched = 1
    for widths, rank, dtype in product(WIDTHS, RANKS, DTYPES):
        weights = SlotWeights(
            num_slots=2048,
            slice_widths=widths,
            in_features=65536,
            rank=rank,
            dtype=dtype,
            device="meta",
        )
        x, out = (
            torch.empty(rows, n, dtype=dtype, device="meta")
            for n in (weights.in_features, weights.out_features)
        )
        shrunk = torch.empty(shrunk_shape(rows, weights), device="meta")
        shape, tiles = shape_of_batch(rows, weights), TileTables.of(batch)
        launch_shrink(x, weights.tensors, shape, tiles, shrunk, pdl=False)
        launch_expand(shrunk, weights.tensors, shape, tiles, out, pdl=False)
        launch_add(out.float(), shape, tiles, out, pdl=False)
        launched += 3
    assert len(grids.seen) == launched
    for grid in grids.seen:
        assert all(1 <= size <= limit for size, limit in zip(grid, LIMITS, strict=False)), grid
