"""Tables of long and ragged batches, of mappings on the device, and the size of what they need."""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from loragate.core.machine import detect_machine, select_interpreter

select_interpreter()

from loragate.execution.kernel_compiles import kernels_compiled  # noqa: E402
from lorakernels.batch.metadata import BatchMetadata, max_tiles, tile_height  # noqa: E402
from lorakernels.dense.ops import DenseWorkspace, shrunk_shape  # noqa: E402
from lorakernels.dense.weights import SlotWeights  # noqa: E402

DEVICE = detect_machine().device
compiled_only = pytest.mark.skipif(DEVICE == "cpu", reason="needs compiled kernels on a GPU")


def tables_of(slots: list[int], height: int) -> tuple[list[int], list[int]]:
    """The slots of the tiles, and the rows of all tiles with -1 in free places."""
    tile_slots: list[int] = []
    tile_rows: list[int] = []
    for slot in range(max(slots, default=-1) + 1):
        rows = [row for row, user in enumerate(slots) if user == slot]
        rows += [-1] * (-len(rows) % height)
        tile_slots += [slot] * (len(rows) // height)
        tile_rows += rows
    return tile_slots, tile_rows


def assert_tables(metadata: BatchMetadata, slots: list[int]) -> None:
    """Every table, to its very end."""
    tile_slots, tile_rows = tables_of(slots, tile_height(len(slots), metadata.tuning))
    for table, values in (
        (metadata.token_slots, slots),
        (metadata.tile_slots, tile_slots),
        (metadata.tile_rows, tile_rows),
        (metadata.num_tiles, [len(tile_slots)]),
    ):
        assert table.tolist() == values + [-1] * (table.numel() - len(values))


def mapping(slots: list[int]) -> Tensor:
    return torch.tensor(slots, dtype=torch.int32, device=DEVICE)


def test_a_batch_of_several_blocks_of_rows_has_the_tables_of_a_plain_loop() -> None:
    # three blocks of rows in the kernel, the last one not full
    slots = [row // 3 % 3 - 1 for row in range(9000)]
    metadata = BatchMetadata(max_tokens=len(slots), max_slots=2, device=DEVICE)
    metadata.prepare(mapping(slots))
    assert_tables(metadata, slots)


def test_a_batch_has_tiles_of_its_own_height_whatever_the_step_before_had() -> None:
    metadata = BatchMetadata(max_tokens=200, max_slots=3, device=DEVICE)
    heights = set()
    for rows in (20, 200, 20):
        slots = [row % 4 - 1 for row in range(rows)]
        metadata.prepare(mapping(slots))
        assert_tables(metadata, slots)
        heights.add(tile_height(rows, metadata.tuning))
    assert len(heights) == 2


@pytest.mark.parametrize("live", [0, 3, 100, 129])
def test_tiles_of_a_padded_batch_have_the_height_of_all_of_its_rows(live: int) -> None:
    # a kernel reads the tiles at the height that belongs to the rows of its tensors
    metadata = BatchMetadata(max_tokens=200, max_slots=3, device=DEVICE)
    slots = [row % 4 - 1 for row in range(live)]
    metadata.prepare(mapping(slots), num_rows=150)
    height = tile_height(150, metadata.tuning)
    assert height > tile_height(3, metadata.tuning)
    assert_tables(metadata, slots + [-1] * (150 - live))


@pytest.mark.parametrize(("slots", "height"), list(product(range(1, 7), (2, 4))))
def test_tables_have_capacity_for_the_most_ragged_batch(slots: int, height: int) -> None:
    for rows in range(1, 40):
        # all slots but one have a single row
        users = min(slots, rows)
        needed = users - 1 + -(-(rows - users + 1) // height)
        assert max_tiles(rows, slots, height) >= needed, rows


@pytest.mark.parametrize(
    ("widths", "in_features", "rank"),
    [((64,), 4096, 512), ((64, 16, 16), 2048, 16), ((64, 16, 16), 2048, 64), ((64,), 4096, 16)],
)
def test_one_workspace_holds_the_shrink_output_of_every_smaller_batch(
    widths: tuple[int, ...], in_features: int, rank: int
) -> None:
    # a smaller batch splits K further
    weights = SlotWeights(
        num_slots=4,
        slice_widths=widths,
        in_features=in_features,
        rank=rank,
        dtype=torch.bfloat16,
        device="meta",
    )
    size = DenseWorkspace([weights], max_tokens=300).shrunk.numel()
    needed = [math.prod(shrunk_shape(rows, weights)) for rows in range(1, 301)]
    assert max(needed) <= size


@pytest.mark.parametrize("slots", [(1, 64), (64, 1)])
def test_a_workspace_has_room_for_the_tiles_of_the_layer_with_the_most_slots(
    slots: tuple[int, int],
) -> None:
    # each slot may have a tile that is not full
    sizes: dict[str, Any] = {"slice_widths": (32,), "in_features": 64, "rank": 8}
    layers = [
        SlotWeights(num_slots=count, dtype=torch.bfloat16, device="meta", **sizes)
        for count in slots
    ]
    both, *alone = (
        DenseWorkspace(some, max_tokens=64).shrunk.numel()
        for some in (layers, layers[:1], layers[1:])
    )
    assert both == max(alone) > min(alone)


@compiled_only
def test_ids_that_no_slot_has_are_base_rows_where_the_mapping_is_on_the_device() -> None:
    slots = [0, 5, 2, 2**30, -7, 1]
    metadata = BatchMetadata(max_tokens=70, max_slots=5, device=DEVICE)
    metadata.prepare(mapping(slots))
    assert_tables(metadata, [slot if 0 <= slot < 5 else -1 for slot in slots])


# at a power of two and on either side
@pytest.mark.parametrize("max_slots", [1, 2, 3, 15, 16, 17, 31, 32, 33, 64, 65, 128, 129])
def test_the_first_id_that_no_slot_has_is_a_base_row(max_slots: int) -> None:
    # as a graph installs it, which asks the host for nothing
    given = [max_slots - 1, max_slots, max_slots + 1, 0, 1 << 30, -7]
    metadata = BatchMetadata(max_tokens=8, max_slots=max_slots, device=DEVICE)
    metadata.expect(len(given), len(given), may_have=True)
    metadata.install(mapping(given), len(given))
    assert_tables(metadata, [max_slots - 1, -1, -1, 0, -1, -1])


@compiled_only
def test_a_batch_size_that_could_be_specialised_on_compiles_no_kernel_anew() -> None:
    metadata = BatchMetadata(max_tokens=9000, max_slots=2, device=DEVICE)
    compiled: list[str] = []
    for rows in (20, 16, 1, 17):
        with kernels_compiled(compiled):
            metadata.prepare(mapping([0] * rows))
    assert len(compiled) <= 1, compiled
