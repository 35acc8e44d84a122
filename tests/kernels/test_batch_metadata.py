"""BatchMetadata against a plain loop over the rows, in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from loragate.core.machine import select_interpreter

select_interpreter()

from lorakernels.batch.metadata import BatchMetadata, max_tiles, tile_height  # noqa: E402

MAX_TOKENS, MAX_SLOTS = 70, 5


def expected_tiles(slots: list[int], height: int) -> list[tuple[int, list[int]]]:
    tiles = []
    for slot in range(MAX_SLOTS):
        rows = [row for row, owner in enumerate(slots) if owner == slot]
        for start in range(0, len(rows), height):
            tiles.append((slot, rows[start : start + height]))
    return tiles


def found_tiles(metadata: BatchMetadata, height: int) -> list[tuple[int, list[int]]]:
    tiles = []
    for tile in range(int(metadata.num_tiles)):
        rows = metadata.tile_rows[tile * height : (tile + 1) * height].tolist()
        tiles.append((int(metadata.tile_slots[tile]), [row for row in rows if row >= 0]))
    return tiles


def prepared(*steps: list[int]) -> BatchMetadata:
    metadata = BatchMetadata(max_tokens=MAX_TOKENS, max_slots=MAX_SLOTS, device="cpu")
    for slots in steps:
        metadata.prepare(torch.tensor(slots, dtype=torch.int32))
    return metadata


batches = st.lists(st.integers(-1, MAX_SLOTS - 1), max_size=MAX_TOKENS)


@settings(max_examples=25)
@given(first=batches, second=batches)
def test_any_batch_is_tiled_by_slot_whatever_came_before_it(
    first: list[int], second: list[int]
) -> None:
    metadata = prepared(first, second)
    height = tile_height(len(second))
    assert found_tiles(metadata, height) == expected_tiles(second, height)
    live = int(metadata.num_tiles)
    assert (metadata.tile_slots[live:] == -1).all()
    assert (metadata.tile_rows[live * height :] == -1).all()
    assert metadata.token_slots[: len(second)].tolist() == second
    assert (metadata.token_slots[len(second) :] == -1).all()


def test_all_rows_of_one_slot_after_a_full_mix_leave_nothing_of_the_mix() -> None:
    mix = [row % MAX_SLOTS for row in range(MAX_TOKENS)]
    metadata = prepared(mix, [4] * 3)
    assert found_tiles(metadata, 16) == [(4, [0, 1, 2])]
    assert metadata.tile_slots.tolist() == [4] + [-1] * (len(metadata.tile_slots) - 1)


def test_an_all_base_batch_after_an_adapter_batch_has_no_tile() -> None:
    metadata = prepared([0, 1, 2], [-1, -1])
    assert int(metadata.num_tiles) == 0
    assert (metadata.tile_slots == -1).all()
    assert (metadata.token_slots == -1).all()


def test_rows_after_the_live_ones_of_a_padded_batch_are_base_rows() -> None:
    metadata = prepared([3] * MAX_TOKENS)
    metadata.prepare(torch.tensor([1, 2], dtype=torch.int32), num_rows=40)
    assert metadata.num_rows == 40
    assert metadata.token_slots.tolist() == [1, 2] + [-1] * (MAX_TOKENS - 2)


def test_the_buffers_keep_their_addresses_from_step_to_step() -> None:
    metadata = prepared([0, 1])
    before = [metadata.token_slots.data_ptr(), metadata.tile_rows.data_ptr()]
    metadata.prepare(torch.zeros(60, dtype=torch.int32))
    assert before == [metadata.token_slots.data_ptr(), metadata.tile_rows.data_ptr()]


def test_a_fresh_instance_maps_every_row_to_the_base() -> None:
    metadata = BatchMetadata(max_tokens=8, max_slots=2, device="cpu")
    assert (metadata.token_slots == -1).all()
    assert int(metadata.num_tiles) == 0


@pytest.mark.parametrize(
    ("num_rows", "height"),
    [(0, 16), (1, 16), (64, 16), (65, 32), (128, 32), (129, 64), (2047, 64), (2048, 128)],
)
def test_tiles_get_higher_beyond_the_largest_batch_of_each_height(
    num_rows: int, height: int
) -> None:
    assert tile_height(num_rows) == height


def test_every_table_is_int32() -> None:
    metadata = prepared([0, 1])
    tables = (metadata.token_slots, metadata.tile_slots, metadata.tile_rows, metadata.num_tiles)
    assert {table.dtype for table in tables} == {torch.int32}


@pytest.mark.parametrize("num_rows", [1, 15, 128, 129, 1024, 1025, 2047, 2048, 9000])
def test_the_tables_hold_the_worst_batch_of_every_size(num_rows: int) -> None:
    slots = 7
    height = tile_height(num_rows)
    metadata = BatchMetadata(max_tokens=num_rows, max_slots=slots, device="cpu")
    for smaller in {1, num_rows // 2, num_rows} - {0}:
        needed = max_tiles(smaller, slots, tile_height(smaller))
        assert needed <= metadata.tile_slots.shape[0]
        assert needed * tile_height(smaller) <= metadata.tile_rows.shape[0]
    assert height in (16, 32, 64, 128)


@pytest.mark.parametrize(
    ("token_slots", "num_rows", "message"),
    [
        (torch.zeros(3, dtype=torch.int64), None, "token_slots must be int32"),
        (torch.zeros(2, 2, dtype=torch.int32), None, "with one dimension"),
        (torch.zeros(8, dtype=torch.int32)[::2], None, "token_slots must be contiguous"),
        (torch.zeros(71, dtype=torch.int32), None, r"may have 70 rows \(got 71\)"),
        (torch.zeros(3, dtype=torch.int32), 2, r"num_rows must be at least 3.*\(got 2\)"),
        (torch.tensor([0, 5], dtype=torch.int32), None, r"must be -1 to 4 \(got 0 to 5\)"),
        (torch.tensor([-2, 1], dtype=torch.int32), None, r"must be -1 to 4 \(got -2 to 1\)"),
    ],
)
def test_a_bad_mapping_is_refused_and_the_old_one_stays(
    token_slots: torch.Tensor, num_rows: int | None, message: str
) -> None:
    metadata = prepared([2, -1, 0])
    with pytest.raises(ValueError, match=message):
        metadata.prepare(token_slots, num_rows=num_rows)
    assert metadata.num_rows == 3
    assert metadata.token_slots[:3].tolist() == [2, -1, 0]


@pytest.mark.parametrize("row", range(4))
@pytest.mark.parametrize("given", [-2, 5])
def test_an_id_that_no_slot_has_is_refused_in_every_row(row: int, given: int) -> None:
    slots = [2, -1, 4, 0]
    slots[row] = given
    message = rf"must be -1 to 4 \(got {min(slots)} to {max(slots)}\)"
    with pytest.raises(ValueError, match=message):
        prepared(slots)


def test_a_step_without_rows_has_no_adapter() -> None:
    metadata, none = prepared(), torch.empty(0, dtype=torch.int32)
    assert metadata.check(none) is False
    with metadata.without_adapters(3):
        # as it may be prepared where no adapter is allowed
        metadata.prepare(none, num_rows=2)
        assert metadata.num_rows == 2


def test_a_mapping_whose_values_the_host_does_not_read_may_have_adapters() -> None:
    # a device that has no values at all
    metadata = BatchMetadata(max_tokens=MAX_TOKENS, max_slots=MAX_SLOTS, device="meta")
    nothing = torch.full((3,), -1, dtype=torch.int32)
    assert metadata.check(nothing.to("meta"))
    assert not metadata.check(nothing)
    assert metadata.check(nothing.abs())
