"""With LORAKERNELS_BATCH_INVARIANT=1 nothing that decides the bits of a row follows from the number
of rows of its batch."""

from __future__ import annotations

import pytest
import torch

from lorakernels.batch.metadata import BatchMetadata, tile_height
from lorakernels.dense.expand_plan import plan_expand
from lorakernels.dense.forms import plan_form
from lorakernels.dense.plan import plan_shrink
from lorakernels.dense.shape import DenseShape
from lorakernels.gdn.forms import plan_gdn
from lorakernels.moe.delta import plan as moe
from lorakernels.moe.layer import forms
from lorakernels.moe.tiles import base_tile_height
from lorakernels.runtime.options import BATCH_INVARIANT
from lorakernels.runtime.tuning import DEFAULT, tuning_of

CPU = torch.device("cpu")
ROWS = (1, 15, 16, 17, 64, 128, 129, 300, 1024, 1025, 2048, 5000)
ITEMSIZES = (2, 4)


@pytest.fixture(autouse=True)
def _promised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(BATCH_INVARIANT, "1")


@pytest.mark.parametrize("itemsize", ITEMSIZES)
@pytest.mark.parametrize("widths", [(17,), (4096, 1024, 1024), (12288, 12288)])
@pytest.mark.parametrize("depth", [40, 4096, 12288])
@pytest.mark.parametrize("rank", [8, 64, 256])
def test_a_linear_layer_has_one_plan_for_all_batches(
    itemsize: int, widths: tuple[int, ...], depth: int, rank: int
) -> None:
    tuning = tuning_of(CPU)
    shapes = [DenseShape(rows, depth, widths, rank, itemsize, tuning) for rows in ROWS]
    plans = {
        (
            shape.height,
            plan_shrink(shape),
            plan_expand(shape),
            plan_form(shape, dual_stream=True),
            plan_gdn(shape, dual_stream=True),
        )
        for shape in shapes
    }
    assert len(plans) == 1


@pytest.mark.parametrize("itemsize", ITEMSIZES)
@pytest.mark.parametrize("widths", [(17,), (768, 768), (7168,)])
@pytest.mark.parametrize("depth", [40, 2048, 7168])
@pytest.mark.parametrize("rank", [8, 64, 128, 256])
@pytest.mark.parametrize("experts", [2, 16, 128])
def test_experts_have_one_plan_for_all_batches(
    itemsize: int, widths: tuple[int, ...], depth: int, rank: int, experts: int
) -> None:
    tuning = tuning_of(CPU)
    shapes = [moe.MoEShape(pairs, experts, depth, widths, rank, itemsize, tuning) for pairs in ROWS]
    plans = {
        (
            shape.height,
            base_tile_height(shape.num_pairs, experts, tuning),
            moe.plan_path(shape, None),
            moe.plan_shrink(shape),
            moe.plan_expand(shape),
            moe.plan_one_shot(shape) if rank <= moe.MAX_FUSED_RANK else None,
            forms.plan_form(shape.num_pairs, tuning, dual_stream=True),
        )
        for shape in shapes
    }
    assert len(plans) == 1


def test_one_plan_is_taken_only_where_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    heights = {tile_height(rows, tuning_of(CPU)) for rows in ROWS}
    assert heights == {32}
    monkeypatch.setenv(BATCH_INVARIANT, "0")
    assert tuning_of(CPU) == DEFAULT
    assert {tile_height(rows, tuning_of(CPU)) for rows in ROWS} == {16, 32, 64, 128}


def test_tables_refuse_steps_under_another_value_and_stay_as_they_were(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    metadata = BatchMetadata(max_tokens=40, max_slots=2, device=CPU)
    slots = torch.zeros(3, dtype=torch.int32)
    metadata.prepare(slots)
    before = [buffer.clone() for buffer in metadata.buffers]
    monkeypatch.setenv(BATCH_INVARIANT, "0")
    with pytest.raises(ValueError, match="must be as it was when the tables were made"):
        metadata.prepare(torch.ones(5, dtype=torch.int32))
    assert metadata.num_rows == 3
    for buffer, was in zip(metadata.buffers, before, strict=True):
        assert torch.equal(buffer, was)


def test_other_values_of_the_option_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(BATCH_INVARIANT, "yes")
    with pytest.raises(ValueError, match=r"LORAKERNELS_BATCH_INVARIANT must be 0 or 1 \(got 'yes'"):
        tuning_of(CPU)
