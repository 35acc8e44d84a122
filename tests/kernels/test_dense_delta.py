"""The dense delta against fp64, in Triton's interpreter, for every outcome of a plan."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from loragate.core.machine import select_interpreter

select_interpreter()

from lorakernels.batch import metadata  # noqa: E402
from lorakernels.batch.metadata import BatchMetadata, max_tiles  # noqa: E402
from lorakernels.dense import launch, plan  # noqa: E402
from lorakernels.dense import shape as shapes  # noqa: E402
from lorakernels.dense.expand_plan import plan_expand  # noqa: E402
from lorakernels.dense.ops import (  # noqa: E402
    DenseWorkspace,
    dense_delta,
    expand_from_tiles,
    shrink_in_tiles,
    shrunk_shape,
)
from lorakernels.dense.plan import plan_shrink  # noqa: E402
from lorakernels.dense.shape import DenseShape  # noqa: E402
from lorakernels.dense.sizes import largest_shrunk, plan_shrunk  # noqa: E402
from lorakernels.dense.weights import LoRAFactors, SlotWeights  # noqa: E402
from lorakernels.runtime.tuning import HOPPER, UNMEASURED, Tuning  # noqa: E402

K, WIDTHS, RANK, SLOTS = 70, (48, 16, 16), 20, 3


class Setup:
    def __init__(self, rows: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)

        def randn(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator)

        self.weights = SlotWeights(
            num_slots=SLOTS,
            slice_widths=WIDTHS,
            in_features=K,
            rank=RANK,
            dtype=dtype,
            device="cpu",
        )
        for slot in range(SLOTS):
            ranks = (RANK, 3 + slot, 16)
            self.weights.load(
                slot,
                [
                    # slot 1 leaves its second slice without an adapter
                    None
                    if (slot, index) == (1, 1)
                    else LoRAFactors(randn(rank, K), randn(width, rank), 0.5 + slot)
                    for index, (rank, width) in enumerate(zip(ranks, WIDTHS, strict=True))
                ],
            )
        self.token_slots = torch.randint(-1, SLOTS, (rows,), generator=generator)
        self.token_slots = self.token_slots.to(torch.int32)
        self.metadata = BatchMetadata(max_tokens=max(rows, 1), max_slots=SLOTS, device="cpu")
        self.metadata.prepare(self.token_slots)
        self.x = randn(rows, K).to(dtype)
        self.base = randn(rows, sum(WIDTHS)).to(dtype)
        self.workspace = DenseWorkspace([self.weights], max_tokens=max(rows, 1))
        self.workspace.shrunk.fill_(float("nan"))

    def run(self) -> Tensor:
        out = self.base.clone()
        dense_delta(self.x, self.weights, self.metadata, self.workspace, out)
        return out

    def expected(self) -> Tensor:
        out = self.base.double()
        slots = self.token_slots.long()
        live = slots >= 0
        a = self.weights.a.double()[slots[live]]
        b = self.weights.b.double()[slots[live]]
        scales = self.weights.scales.double()[slots[live]]
        start = 0
        for index, width in enumerate(WIDTHS):
            h = torch.einsum("mk,mrk->mr", self.x.double()[live], a[:, index])
            delta = torch.einsum("mr,mnr->mn", h, b[:, start : start + width])
            out[live, start : start + width] += scales[:, index, None] * delta
            start += width
        return out

    def check(self, out: Tensor, tolerance: float) -> None:
        expected = self.expected()
        error = (out.double() - expected).norm() / (expected - self.base.double()).norm()
        assert error < tolerance
        base_rows = self.token_slots < 0
        assert torch.equal(out[base_rows], self.base[base_rows])


def test_each_row_gets_the_delta_of_its_own_slot_and_base_rows_keep_their_bits() -> None:
    setup = Setup(40)
    setup.check(setup.run(), 1e-6)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float16, 1e-3), (torch.bfloat16, 8e-3)])
def test_half_precision_stays_within_its_rounding(dtype: torch.dtype, tolerance: float) -> None:
    setup = Setup(20, dtype)
    setup.check(setup.run(), tolerance)


@pytest.mark.usefixtures("new_plans")
@pytest.mark.parametrize("height", [32, 64, 128])
@pytest.mark.parametrize("programs", [1, 5])
def test_prefill_launches_compute_the_same_as_decode_launches(
    monkeypatch: pytest.MonkeyPatch, height: int, programs: int
) -> None:
    # only a large batch has tall tiles; here the height is forced on a small one
    for module in (shapes, metadata):
        monkeypatch.setattr(module, "tile_height", lambda rows, tuning: height)
    # with a single program on the tile axis every tile comes from the stride loop
    monkeypatch.setattr(launch, "tile_programs", lambda shape, capacity: min(programs, capacity))
    setup = Setup(140)
    setup.check(setup.run(), 1e-6)
    setup = Setup(70, torch.bfloat16)
    setup.check(setup.run(), 8e-3)


def test_a_live_rank_beyond_one_block_of_ranks_is_contracted_whole() -> None:
    weights = SlotWeights(
        num_slots=1, slice_widths=(24,), in_features=32, rank=300, dtype=torch.float32, device="cpu"
    )
    generator = torch.Generator().manual_seed(1)
    a, b = torch.randn(290, 32, generator=generator), torch.randn(24, 290, generator=generator)
    weights.load(0, [LoRAFactors(a, b, 2.0)])
    metadata = BatchMetadata(max_tokens=5, max_slots=1, device="cpu")
    metadata.prepare(torch.zeros(5, dtype=torch.int32))
    x, out = torch.randn(5, 32, generator=generator), torch.zeros(5, 24)
    dense_delta(x, weights, metadata, DenseWorkspace([weights], max_tokens=5), out)
    expected = 2.0 * (x.double() @ a.double().T) @ b.double().T
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-4)


def test_column_slices_and_transposed_views_are_read_and_written_in_place() -> None:
    setup = Setup(20)
    wide_x = torch.full((20, K + 9), float("nan"))
    wide_x[:, 4 : 4 + K] = setup.x
    wide_out = torch.full((20, 100), 7.0)
    out = wide_out[:, 11 : 11 + sum(WIDTHS)]
    out.copy_(setup.base)
    dense_delta(wide_x[:, 4 : 4 + K], setup.weights, setup.metadata, setup.workspace, out)
    setup.check(out, 1e-6)
    assert (wide_out[:, :11] == 7).all()
    assert (wide_out[:, 11 + sum(WIDTHS) :] == 7).all()
    setup.x = setup.x.T.contiguous().T
    assert setup.x.stride(0) == 1
    setup.check(setup.run(), 1e-6)


def test_the_same_step_gives_the_same_bits_again() -> None:
    setup = Setup(40, torch.bfloat16)
    assert torch.equal(setup.run(), setup.run())


def test_shrink_and_expand_make_up_the_delta() -> None:
    setup = Setup(30)
    shrunk = torch.full(shrunk_shape(30, setup.weights), float("nan"))
    shrink_in_tiles(setup.x, setup.weights, setup.metadata, shrunk)
    out = setup.base.clone()
    expand_from_tiles(shrunk, setup.weights, setup.metadata, out)
    assert torch.equal(out, setup.run())


def test_ranks_that_an_adapter_does_not_have_are_0_in_the_shrink_output() -> None:
    setup = Setup(30)
    shrunk = torch.full(shrunk_shape(30, setup.weights), float("nan"))
    shrink_in_tiles(setup.x, setup.weights, setup.metadata, shrunk)
    height = metadata.tile_height(30)
    for place, row in enumerate(setup.metadata.tile_rows.tolist()):
        if row >= 0:
            slot = setup.metadata.tile_slots[place // height]
            found = shrunk[:, place].view(-1, len(WIDTHS), RANK)
            for index, rank in enumerate(setup.weights.ranks[slot].tolist()):
                assert not found[:, index, rank:].any()
                assert found[:, index, :rank].isfinite().all()


def test_rows_of_slots_that_the_weights_do_not_have_are_refused() -> None:
    setup = Setup(20)
    slots = setup.weights.num_slots
    metadata = BatchMetadata(max_tokens=20, max_slots=slots + 1, device="cpu")
    metadata.prepare(torch.full((20,), slots, dtype=torch.int32))
    with pytest.raises(ValueError, match=rf"at most {slots} slots like the weights"):
        dense_delta(setup.x, setup.weights, metadata, setup.workspace, setup.base.clone())


def test_an_empty_batch_shrinks_to_nothing() -> None:
    setup = Setup(0)
    shrink_in_tiles(
        setup.x, setup.weights, setup.metadata, torch.empty(shrunk_shape(0, setup.weights))
    )


@pytest.mark.parametrize("rows", [0, 1])
def test_a_batch_of_nothing_or_of_one_row_runs(rows: int) -> None:
    setup = Setup(rows)
    out = setup.run()
    assert out.shape == (rows, sum(WIDTHS))
    torch.testing.assert_close(out.double(), setup.expected(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(19, K)}, "must have 20 rows, as the metadata was prepared for"),
        ({"x": torch.zeros(20, K + 1)}, r"x must have 70 columns \(got 71\)"),
        ({"x": torch.zeros(20, K, dtype=torch.float16)}, "x must be torch.float32"),
        ({"out": torch.zeros(20, 79)}, r"out must have 80 columns \(got 79\)"),
        ({"out": torch.zeros(19, 80)}, r"out must have 20 rows like x \(got 19\)"),
        ({"out": torch.zeros(20, 80, dtype=torch.bfloat16)}, "out must be torch.float32"),
        ({"x": torch.zeros(20)}, "two dimensions"),
        ({"out": torch.zeros(20)}, r"out must have two dimensions \(got shape \[20\]\)"),
    ],
)
def test_wrong_tensors_are_refused_by_name(change: dict[str, Tensor], message: str) -> None:
    setup = Setup(20)
    out = setup.base.clone()
    arguments = {"x": setup.x, "out": out} | change
    with pytest.raises(ValueError, match=message):
        dense_delta(
            arguments["x"], setup.weights, setup.metadata, setup.workspace, arguments["out"]
        )
    assert torch.equal(out, setup.base)


@pytest.mark.parametrize("start", [0, 1, 40, 69])
def test_an_output_that_overlaps_the_input_is_refused(start: int) -> None:
    setup = Setup(20)
    buffer = torch.zeros(20, K + sum(WIDTHS))
    before = buffer.clone()
    with pytest.raises(ValueError, match="out must not overlap x"):
        dense_delta(
            buffer[:, :K],
            setup.weights,
            setup.metadata,
            setup.workspace,
            buffer[:, start : start + sum(WIDTHS)],
        )
    assert torch.equal(buffer, before)


def test_input_and_output_may_be_columns_side_by_side_in_one_buffer() -> None:
    setup = Setup(20)
    buffer = torch.cat([setup.x, setup.base], dim=1)
    out = buffer[:, K:]
    dense_delta(buffer[:, :K], setup.weights, setup.metadata, setup.workspace, out)
    setup.check(out, 1e-6)
    assert torch.equal(buffer[:, :K], setup.x)


def test_a_workspace_for_smaller_batches_is_refused() -> None:
    setup = Setup(40)
    setup.workspace = DenseWorkspace([setup.weights], max_tokens=1)
    setup.workspace.shrunk = setup.workspace.shrunk[:64]
    with pytest.raises(ValueError, match="workspace must hold"):
        setup.run()


SHAPES = [
    DenseShape(0, 4096, (4096, 1024, 1024), rank, itemsize)
    for rank in (1, 8, 16, 64, 65, 128, 129, 256, 320, 512)
    for itemsize in (2, 4)
]


@pytest.mark.parametrize("rows", [1, 17, 128, 129, 1030, 2050])
def test_no_program_looks_for_a_tile_outside_the_tables(rows: int) -> None:
    batch = BatchMetadata(max_tokens=rows, max_slots=3, device="meta")
    shape = DenseShape(rows, 8, (8,), 4, 4)
    height = shape.height
    capacity = launch.TileTables.of(batch).capacity(height)
    assert plan.tile_programs(shape, capacity) <= capacity <= batch.tile_slots.shape[0]
    assert capacity * height <= batch.tile_rows.shape[0]
    # and all that a batch can need fit
    assert capacity >= max_tiles(rows, 3, height)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"r{s.rank}-b{s.itemsize}")
def test_the_workspace_holds_the_shrink_output_of_every_batch_size(shape: DenseShape) -> None:
    from dataclasses import replace
    from math import prod

    limit = largest_shrunk(shape, 6, 3000)
    sizes = [*range(1, 300), *range(500, 600), 2047, 2048, 2049, 3000]
    assert all(prod(plan_shrunk(replace(shape, num_rows=size), 6)) <= limit for size in sizes)


@pytest.mark.parametrize("rows", [1, 128, 129, 511, 512, 2047, 2048, 100_000])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"r{s.rank}-b{s.itemsize}")
@pytest.mark.parametrize(
    ("tuning", "shared_bytes"),
    [
        pytest.param(HOPPER, 227 * 1024, id="sm_90"),
        pytest.param(UNMEASURED, 163 * 1024, id="sm_80"),
    ],
)
def test_every_plan_can_be_launched(
    shape: DenseShape, rows: int, tuning: Tuning, shared_bytes: int
) -> None:
    from dataclasses import replace

    shape = replace(shape, num_rows=rows, tuning=tuning)
    shrink, expand = plan_shrink(shape), plan_expand(shape)
    height = shape.height
    assert height % expand.block_m == 0
    assert 1 <= shrink.splits <= 32
    assert shrink.block_n >= 16
    assert expand.block_r >= 16
    # a program that streams columns holds the whole rank on chip
    assert expand.group == 1 or expand.block_r >= shape.rank
    stage = (height + shrink.block_n) * shrink.block_k * shape.itemsize
    assert stage * shrink.num_stages <= shared_bytes
    if expand.group > 1:
        stage = (expand.block_m + expand.block_r) * expand.block_n * shape.itemsize
        assert stage * expand.num_stages <= shared_bytes
