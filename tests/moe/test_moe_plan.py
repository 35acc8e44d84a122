"""Properties of the plans of every shape: a workspace that is large enough, a supported path."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from lorakernels.moe.delta.plan import (
    MAX_FUSED_RANK,
    MoEPath,
    MoEShape,
    plan_one_shot,
    plan_path,
    plan_shrink,
    plan_small_batch,
)
from lorakernels.moe.delta.sizes import largest_shrunk, shrunk_shape

SHAPES = [
    MoEShape(1, 8, 4096, (7168, 7168), 16, 2),
    MoEShape(1, 128, 2048, (768, 768), 64, 2),
    MoEShape(1, 512, 2048, (512, 512), 512, 2),
    MoEShape(1, 1, 48, (33,), 1, 4),
    MoEShape(1, 256, 7168, (2048, 2048), 128, 2),
    # not a power of two: the number of split-K partials rises between powers of two
    MoEShape(1, 33, 2048, (768, 768), 16, 2),
    MoEShape(1, 36, 7168, (2048, 2048), 16, 2),
    MoEShape(1, 72, 4096, (512, 512), 64, 2),
    # behind decode there are fewer partials, and so the last batch of decode needs most
    MoEShape(1, 512, 2048, (768, 768), 128, 4),
    MoEShape(1, 9, 1024, (64,), 256, 4),
]


@pytest.mark.parametrize("shape", SHAPES)
def test_the_workspace_holds_the_shrink_output_of_every_smaller_batch(shape: MoEShape) -> None:
    sizes = [math.prod(shrunk_shape(replace(shape, num_pairs=n))) for n in range(1, 5001)]
    for most in (1, 16, 20, 24, 3541, 4096, 5000):
        assert max(sizes[:most]) == largest_shrunk(replace(shape, num_pairs=most))


@pytest.mark.parametrize("rank", [1, 16, 128, 129, 512])
@pytest.mark.parametrize("path", list(MoEPath))
def test_a_rank_that_a_path_cannot_take_goes_to_two_kernels(rank: int, path: MoEPath) -> None:
    shape = MoEShape(64, 8, 256, (256,), rank, 2)
    chosen = plan_path(shape, path)
    assert chosen is (path if rank <= MAX_FUSED_RANK else MoEPath.TWO_KERNEL)


@pytest.mark.parametrize(
    ("change", "path"),
    [
        ({}, MoEPath.SMALL_BATCH),
        ({"rank": 17}, MoEPath.TWO_KERNEL),
        # as many values of x, in fewer rows of more
        ({"num_pairs": 63, "in_features": 2049}, MoEPath.TWO_KERNEL),
        ({"num_pairs": 65}, MoEPath.TWO_KERNEL),
        # 256 tiles, 128 of higher ranks; each expert has one for each slot
        ({"num_experts": 256, "num_pairs": 256}, MoEPath.ONE_SHOT),
        ({"num_experts": 256, "num_pairs": 255}, MoEPath.TWO_KERNEL),
        ({"num_experts": 256, "num_pairs": 128, "rank": 17}, MoEPath.ONE_SHOT),
        ({"num_experts": 256, "num_pairs": 127, "rank": 17}, MoEPath.TWO_KERNEL),
        ({"num_experts": 256, "num_pairs": 256, "slice_widths": (4096,)}, MoEPath.ONE_SHOT),
        ({"num_experts": 256, "num_pairs": 256, "slice_widths": (4097,)}, MoEPath.TWO_KERNEL),
    ],
)
def test_a_path_ends_where_it_is_documented_to_end(change: dict[str, Any], path: MoEPath) -> None:
    largest = MoEShape(64, 8, 2048, (2048,), 16, 2)
    assert plan_path(replace(largest, **change), None) is path


@pytest.mark.parametrize(
    "widths", [(24,), (24, 24), (24, 16), (16, 24), (24, 24, 24), (512, 384), (128, 128)]
)
@pytest.mark.parametrize("rank", [1, 16, 17, 32, 33, 128])
def test_only_two_slices_of_one_width_share_a_program(widths: tuple[int, ...], rank: int) -> None:
    # it sweeps the columns of both at once
    pairs = (1, 64, 1024, 4096, 100_000)
    plans = [plan_one_shot(MoEShape(n, 1, 64, widths, rank, 2)) for n in pairs]
    assert not any(plan.paired for plan in plans) or (len(widths) == 2 and len(set(widths)) == 1)


@pytest.mark.parametrize("num_pairs", [1, 7, 128, 2048, 100_000])
@pytest.mark.parametrize("shape", SHAPES)
def test_blocks_are_powers_of_two_that_a_tensor_core_takes(shape: MoEShape, num_pairs: int) -> None:
    at = replace(shape, num_pairs=num_pairs, rank=min(shape.rank, MAX_FUSED_RANK))
    shrink, one, small = plan_shrink(at), plan_one_shot(at), plan_small_batch(at)
    blocks = [shrink.block_n, shrink.block_k, one.block_n, one.block_k, one.block_r]
    assert all(block >= 16 and block.bit_count() == 1 for block in blocks)
    assert all(b.bit_count() == 1 for b in (small.block_n, small.block_k, small.block_r))
    assert shrink.splits.bit_count() == 1
