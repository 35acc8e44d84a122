"""A plan that is found again is that of the same sizes and the same constants."""

from __future__ import annotations

from dataclasses import replace

from lorakernels.dense.expand_plan import plan_expand
from lorakernels.dense.plan import plan_shrink
from lorakernels.dense.shape import DenseShape
from lorakernels.moe.delta import plan as moe
from lorakernels.runtime.tuning import DEFAULT


def test_a_plan_of_a_linear_layer_is_that_of_its_sizes_and_constants() -> None:
    shape = DenseShape(300, 4096, (4096, 1024), 16, 2)
    assert plan_shrink(replace(shape)) is plan_shrink(shape)
    other = replace(DEFAULT, dense=replace(DEFAULT.dense, prefill_height=16))
    changed = replace(shape, tuning=other)
    assert plan_shrink(changed) == plan_shrink.__wrapped__(changed) != plan_shrink(shape)
    assert plan_expand(changed) == plan_expand.__wrapped__(changed)


def test_a_plan_of_experts_is_that_of_its_sizes_and_constants() -> None:
    shape = moe.MoEShape(4096, 128, 2048, (768, 768), 16, 2)
    other = replace(DEFAULT, moe=replace(DEFAULT.moe, most_columns=64))
    assert moe.plan_path(shape, None) is moe.MoEPath.ONE_SHOT
    assert moe.plan_path(replace(shape, tuning=other), None) is moe.MoEPath.TWO_KERNEL
