"""The plans of the dense kernels: what holds for any layer and batch."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lorakernels.batch.metadata import BatchMetadata
from lorakernels.dense import specs
from lorakernels.dense.expand_plan import plan_expand
from lorakernels.dense.launch import TileTables, launch_add, launch_expand, launch_shrink
from lorakernels.dense.ops import shape_of_batch
from lorakernels.dense.plan import plan_shrink
from lorakernels.dense.shape import DenseShape
from lorakernels.dense.sizes import plan_shrunk
from lorakernels.dense.weights import SlotWeights
from lorakernels.runtime.launching import noted_launches
from lorakernels.runtime.tuning import DEFAULT, HOPPER, UNMEASURED, with_one_plan

ROWS = (1, 16, 129, 255, 256, 300, 511, 512, 1000, 2047, 2048, 5000, 8192, 60_000)
RANKS = (1, 8, 16, 24, 33, 64, 65, 96, 128, 129, 200, 256, 257, 512)
LAYERS = (
    (1024, (512,)),
    (4096, (4096, 1024, 1024)),
    (4096, (12288, 12288)),
    (12288, (4096,)),
    (997, (61, 509)),
)
SHAPES = [
    DenseShape(rows, depth, widths, rank, itemsize)
    for (depth, widths), rows, rank, itemsize in product(LAYERS, ROWS, RANKS, (2, 4))
]


# no list of shapes has all that plans tell apart
any_shape = st.builds(
    DenseShape,
    num_rows=st.one_of(st.integers(1, 260), st.integers(1, 70_000)),
    in_features=st.one_of(st.sampled_from((4096, 8192, 14336)), st.integers(1, 30_000)),
    slice_widths=st.lists(
        st.one_of(st.sampled_from((8192, 14336)), st.integers(1, 30_000)), min_size=1, max_size=3
    ).map(tuple),
    rank=st.one_of(st.sampled_from((8, 16, 64, 128)), st.integers(1, 512)),
    itemsize=st.sampled_from((2, 4)),
)


@given(shape=any_shape, beside=st.booleans())
# a step without any rows
@example(shape=DenseShape(0, 24, (16,), 66, 2), beside=False)
def test_no_split_of_k_is_without_a_step(shape: DenseShape, beside: bool):
    plan = plan_shrink(replace(shape, beside=beside))
    assert 1 <= plan.splits <= -(-shape.in_features // plan.block_k)


def test_the_programs_of_several_partials_run_at_once_from_256_rows_on():
    """With the tiles that the usual adapters of a batch fill: one program a multiprocessor of up to
    2047 rows, and two beyond."""
    for shape in (s for s in SHAPES if s.num_rows >= 256 and s.itemsize == 2):
        plan = plan_shrink(shape)
        tiles = -(-shape.num_rows // shape.height)
        programs = tiles * -(-shape.ranks_of_all_slices // plan.block_n) * plan.splits
        most = (1 if shape.height == 64 else 2) * DEFAULT.dense.multiprocessors
        assert plan.splits == 1 or programs <= most, shape


@given(shape=any_shape)
@example(shape=DenseShape(2048, 4096, (4096,), 8, 4))
@example(shape=DenseShape(40, 4096, (4096, 4096), 300, 2))
def test_k_is_split_only_as_long_as_the_tiles_leave_programs_for_it(shape: DenseShape):
    # between decode and prefill, and in a prefill of 16 bits, the tiles that are usual count
    if shape.itemsize == 2 and shape.height >= 64:
        return
    plan, tiles = plan_shrink(shape), -(-shape.num_rows // shape.height)
    programs = tiles * -(-shape.ranks_of_all_slices // plan.block_n) * plan.splits
    assert plan.splits == 1 or programs <= DEFAULT.dense.programs


@given(shape=any_shape)
# its blocks of ranks are wider beside the product, and so more partials would be of least cost
@example(shape=DenseShape(112, 5120, (25600, 25600), 16, 2))
@settings(max_examples=300)
def test_a_hidden_shrink_has_no_more_partials_than_one_behind_the_base_product(shape: DenseShape):
    """Both take the workspace of the latter."""
    assert plan_shrink(replace(shape, beside=True)).splits <= plan_shrink(shape).splits


def test_an_expand_of_few_programs_waits_for_its_shrink():
    """They would all start on the multiprocessors that the shrink leaves free. Programs of a single
    block are many, and read what they add to meanwhile."""
    few = DenseShape(900, 4096, (1024,), 128, 2)
    many = DenseShape(900, 4096, (8192,), 128, 2)
    single = DenseShape(301, 2048, (1024,), 32, 2)
    assert [plan_shrink(shape).trigger_early for shape in (few, many, single)] == [
        False,
        True,
        True,
    ]
    assert plan_expand(single).group == 1 < plan_expand(few).group


@pytest.mark.parametrize(
    ("widths", "rows", "group"),
    [((1024,), 512, 2), ((4096,), 1024, 8), ((12288, 12288), 8192, 16)],
)
def test_few_columns_are_spread_over_the_device_and_many_are_taken_together(widths, rows, group):
    assert plan_expand(DenseShape(rows, 4096, widths, 128, 2)).group == group


@pytest.mark.parametrize(
    ("rows", "widths", "rank", "columns"),
    [
        # a layer whose programs of one block run at once, and one of whose programs not all would
        (16, (4096, 1024, 1024), 64, (256, 1, 8)),
        (5, (14336, 14336), 128, (128, 4, 4)),
        (25, (28672, 28672), 16, (128, 8, 4)),
        # as wide, but with more ranks than a stage holds
        (5, (14336, 14336), 256, (128, 1, 8)),
        # several programs on a multiprocessor, of moderate ranks and of few
        (16, (12288, 12288), 64, (256, 1, 4)),
        (16, (12288, 12288), 16, (256, 1, 8)),
        # tiles of 32 rows
        (100, (4096,), 32, (256, 1, 8)),
        (100, (8192,), 32, (256, 1, 8)),
        (100, (14336,), 32, (64, 4, 4)),
        (100, (14336, 14336), 32, (64, 4, 4)),
        (100, (14336, 14336), 128, (64, 8, 4)),
        (100, (14336, 14336), 200, (64, 8, 8)),
    ],
)
def test_programs_of_few_rows_have_one_block_of_columns_where_all_run_at_once(
    rows, widths, rank, columns
):
    plan = plan_expand(DenseShape(rows, 4096, widths, rank, 2))
    assert (plan.block_n, plan.group, plan.num_warps) == columns


@pytest.mark.parametrize(
    ("rows", "in_features", "widths", "rank", "splits"),
    [
        (1, 4096, (4096,), 128, 16),
        # with more rows, more columns, more ranks or fewer features, reading partials costs more
        (71, 8192, (8192, 1024, 1024), 128, 8),
        (15, 3584, (14336, 14336), 128, 8),
        (100, 4096, (14336, 14336), 128, 4),
        (20, 4096, (14336, 14336), 256, 2),
        (25, 1024, (2048, 1024, 1024), 128, 4),
        (101, 4096, (3584,), 8, 16),
        # no more than programs fill the device
        (16, 28672, (4096, 1024, 1024), 512, 8),
        (33, 14336, (4096, 1024, 1024), 256, 4),
    ],
)
def test_few_rows_have_as_many_partials_as_the_expand_reads_in_the_time_that_they_save(
    rows, in_features, widths, rank, splits
):
    assert plan_shrink(DenseShape(rows, in_features, widths, rank, 2)).splits == splits


@pytest.mark.parametrize(
    ("rows", "widths", "rank", "columns"),
    [
        # a layer of few columns is spread over the device
        (2300, (300,), 200, (64, 2, 8)),
        (2048, (1024,), 64, (64, 4, 4)),
        (8192, (1024,), 64, (64, 8, 4)),
        (2048, (4096, 1024, 1024), 128, (64, 8, 4)),
        (4000, (4096,), 128, (64, 16, 4)),
        # where blocks of 128 columns are many, as many programs as run at once have all of them, up
        # to 12 blocks each
        (3000, (8200,), 64, (128, 6, 4)),
        (2793, (8192, 1024, 1024), 64, (128, 7, 4)),
        (2048, (12288, 12288), 64, (128, 12, 4)),
        (2816, (9216,), 64, (128, 6, 4)),
        (2752, (9216,), 64, (64, 16, 4)),
        (3133, (5120, 1024, 1024), 32, (64, 16, 4)),
    ],
)
def test_programs_of_a_prefill_have_more_columns_the_more_work_there_is(
    rows, widths, rank, columns
):
    plan = plan_expand(DenseShape(rows, 4096, widths, rank, 2))
    assert (plan.block_n, plan.group, plan.num_warps) == columns


@pytest.mark.parametrize(
    ("rows", "widths", "rank", "columns"),
    [
        # three turns of all multiprocessors, and one of most of them
        (3409, (14336, 14336), 128, (128, 128, 16, 8)),
        (2867, (8192,), 65, (128, 128, 16, 8)),
        # some programs more than multiprocessors, and too few programs
        (4091, (8192,), 128, (64, 64, 16, 4)),
        (2741, (4096,), 128, (64, 64, 8, 4)),
        # of more ranks or fewer
        (3409, (14336, 14336), 129, (64, 64, 16, 8)),
        (3409, (14336, 14336), 64, (64, 128, 12, 4)),
    ],
)
def test_blocks_of_whole_tiles_are_taken_where_their_programs_keep_a_hopper_gpu_busy(
    rows, widths, rank, columns
):
    plan = plan_expand(DenseShape(rows, 4096, widths, rank, 2, HOPPER))
    assert (plan.block_m, plan.block_n, plan.group, plan.num_warps) == columns


def test_blocks_of_whole_tiles_are_left_to_gpus_with_the_memory_for_them():
    shape = DenseShape(3409, 4096, (14336, 14336), 128, 2, HOPPER)
    # three stages of a block of the output and one of B, and the ranks of a tile
    needed = 2 * (3 * (128 * 128 + 128 * 128) + 128 * 128)
    for shared_bytes, rows in ((needed, 128), (needed - 1, 64)):
        dense = replace(HOPPER.dense, shared_bytes=shared_bytes)
        plan = plan_expand(replace(shape, tuning=replace(HOPPER, dense=dense)))
        assert plan.block_m == rows
    assert plan_expand(replace(shape, tuning=UNMEASURED)).block_m == 64


# the registers of a multiprocessor, and the threads of a warp
_REGISTERS, _THREADS = 1 << 16, 32


@pytest.mark.parametrize(
    ("rows", "in_features", "widths", "rank", "itemsize", "registers"),
    [
        (1, 12288, (4096,), 16, 2, 255),
        (64, 12288, (4096,), 64, 2, 255),
        (128, 12288, (4096,), 16, 2, 255),
        # 4 tiles x 16 partials x 6 blocks of ranks do not run at once with so many
        (64, 4096, (4096, 1024, 1024), 64, 2, None),
        # 256 programs fit, but of many ranks only one of a multiprocessor is faster so
        (16, 4096, (12288, 12288), 64, 2, None),
        # no more tiles than rows
        (1, 4096, (4096, 1024, 1024), 64, 2, 255),
        # between decode and prefill, and fp32, whose kernels spill as it is
        (129, 12288, (4096,), 16, 2, None),
        (1, 12288, (4096,), 16, 4, None),
    ],
)
def test_a_shrink_of_few_rows_takes_all_registers_where_its_programs_then_run_at_once(
    rows, in_features, widths, rank, itemsize, registers
):
    shape = DenseShape(rows, in_features, widths, rank, itemsize)
    assert plan_shrink(shape).registers == registers
    # the base product needs them
    assert plan_shrink(replace(shape, beside=True)).registers is None


@given(shape=any_shape)
def test_an_expand_of_up_to_16_ranks_leaves_registers_for_two_programs(shape: DenseShape):
    plan = plan_expand(shape)
    if plan.registers is not None and shape.rank <= 16:
        assert 2 * plan.registers * plan.num_warps * _THREADS <= _REGISTERS


@pytest.mark.parametrize(
    ("rows", "widths", "rank", "registers"),
    [
        (1, (4096,), 16, 128),
        (64, (12288, 12288), 8, 128),
        # four tiles of 112 blocks are more than three programs on a multiprocessor
        (17, (14336, 14336), 8, None),
        # columns that are not loaded in vectors
        (33, (509, 61), 7, None),
        # more ranks, few programs and many of them
        (16, (4096,), 32, 255),
        (64, (12288, 12288), 32, None),
        (1, (4096,), 64, None),
        # columns stream by, which are on their way ahead as it is
        (25, (28672, 28672), 16, None),
        (129, (4096,), 16, None),
    ],
)
def test_an_expand_of_few_rows_and_ranks_has_registers_for_all_partials(
    rows, widths, rank, registers
):
    assert plan_expand(DenseShape(rows, 4096, widths, rank, 2)).registers == registers
    assert plan_expand(DenseShape(rows, 4096, widths, rank, 4)).registers is None


@given(shape=any_shape, beside=st.booleans())
def test_no_more_than_16_ranks_of_a_slice_are_read_ahead(shape: DenseShape, beside: bool):
    plan = plan_shrink(replace(shape, beside=beside))
    assert not plan.reads_all_ranks or shape.rank <= 16


@pytest.mark.parametrize(("rank", "is_beside", "ahead"), [(16, 0, 1), (17, 0, 0), (16, 1, 0)])
def test_up_to_16_ranks_are_read_ahead_but_not_beside_the_base_product(rank, is_beside, ahead):
    shape = DenseShape(1, 4096, (4096,), rank, 2, beside=bool(is_beside))
    assert plan_shrink(shape).reads_all_ranks == bool(ahead)


def test_one_plan_for_all_batches_leaves_registers_to_the_compiler():
    shape = DenseShape(1, 12288, (4096,), 16, 2, with_one_plan(DEFAULT))
    assert plan_shrink(shape).registers is None
    assert plan_expand(shape).registers is None


def test_launches_of_few_rows_pass_their_registers_on_but_not_beside_the_base_product():
    weights = SlotWeights(
        num_slots=2, slice_widths=(32,), in_features=64, rank=8, dtype=torch.float16, device="cpu"
    )
    shape, tiles = (
        shape_of_batch(4, weights),
        TileTables.of(BatchMetadata(max_tokens=4, max_slots=2, device="cpu")),
    )
    shrunk, out = torch.empty(plan_shrunk(shape, 2)), torch.empty(4, 32, dtype=torch.float16)
    x = torch.empty(4, 64, dtype=torch.float16)
    with noted_launches() as launches:
        launch_shrink(x, weights.tensors, shape, tiles, shrunk, pdl=False)
        launch_expand(shrunk, weights.tensors, shape, tiles, out, pdl=False)
        launch_expand(shrunk, weights.tensors, shape, tiles, out.float(), pdl=False, store=True)
    assert [launch.options.get("maxnreg") for launch in launches] == [255, 128, None]
    assert launches[0].options["ALL_RANKS"]


def test_a_batch_without_rows_launches_nothing():
    weights = SlotWeights(
        num_slots=2, slice_widths=(32,), in_features=64, rank=8, dtype=torch.float16, device="cpu"
    )
    tiles = TileTables.of(BatchMetadata(max_tokens=4, max_slots=2, device="cpu"))
    for rows, launched in ((0, 0), (1, 4)):
        shape = shape_of_batch(rows, weights)
        shrunk, stored = torch.empty(plan_shrunk(shape, 2)), torch.empty(rows, 32)
        x, out = torch.empty(rows, 64).half(), torch.empty(rows, 32).half()
        with noted_launches() as launches:
            launch_shrink(x, weights.tensors, shape, tiles, shrunk, pdl=False)
            launch_expand(shrunk, weights.tensors, shape, tiles, out, pdl=False)
            launch_expand(shrunk, weights.tensors, shape, tiles, stored, pdl=False, store=True)
            launch_add(stored, shape, tiles, out, pdl=False)
        assert len(launches) == launched


@pytest.mark.parametrize(("capability", "block"), [(90, (128, 128)), (80, (64, 64))])
def test_what_is_compiled_ahead_for_a_gpu_follows_from_the_measurements_of_its_family(
    capability, block
):
    launch = dict(specs.launches(capability))["gate-up-bf16-r128-t2048"]
    with noted_launches() as launches:
        launch()
    expand = launches[-1]
    assert (expand.options["BLOCK_M"], expand.options["BLOCK_N"]) == block
