"""Operators without what `torch.library.custom_op` puts around each call in Python."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from lorakernels.dense.plan import DenseShape, plan_expand, plan_shrink
from lorakernels.moe.delta import plan as moe
from lorakernels.runtime.operators import register_operator
from lorakernels.runtime.tuning import DEFAULT

callers: list[str] = []


def frames() -> Iterator[str]:
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        yield f"{frame.f_globals.get('__name__')}.{frame.f_code.co_name}"


@register_operator("test_adds", mutates=("out",))
def adds(x: Tensor, by: list[int], out: Tensor) -> None:
    # without this function
    callers[:] = list(frames())[1:]
    out.add_(x * sum(by))


def call(x: Tensor, out: Tensor) -> None:
    torch.ops.lorakernels.test_adds(x, [1, 2], out)


def test_a_call_reaches_its_operator_through_one_function_of_torch() -> None:
    x, out = torch.ones(3), torch.ones(3)
    with torch.no_grad():
        call(x, out)
    assert out.tolist() == [4, 4, 4]
    here = callers.index(f"{__name__}.call")
    assert callers[:here] == ["torch._ops.__call__"], callers[: here + 1]


def test_a_graph_of_torch_holds_an_operator_and_knows_what_it_writes() -> None:
    def doubled(x: Tensor) -> Tensor:
        out = torch.zeros(3)
        before = out.clone()
        torch.ops.lorakernels.test_adds(x, [2], out)
        return out + before

    traced = torch.compile(doubled, backend="aot_eager", fullgraph=True)
    assert traced(torch.ones(3)).tolist() == [2, 2, 2]


def test_an_operator_passes_the_checks_of_torch() -> None:
    torch.library.opcheck(torch.ops.lorakernels.test_adds, (torch.ones(3), [1], torch.ones(3)))


@pytest.mark.parametrize("shape", [DenseShape(300, 4096, (4096, 1024), 16, 2)])
def test_a_plan_that_is_found_again_is_that_of_the_same_sizes_and_constants(
    shape: DenseShape,
) -> None:
    assert plan_shrink(replace(shape)) is plan_shrink(shape)
    other = replace(DEFAULT, dense=replace(DEFAULT.dense, prefill_height=16))
    changed = replace(shape, tuning=other)
    # hash alone does not tell them apart
    assert hash(changed) == hash(shape)
    assert plan_shrink(changed) == plan_shrink.__wrapped__(changed) != plan_shrink(shape)
    assert plan_expand(changed) == plan_expand.__wrapped__(changed)


def test_a_plan_of_experts_is_that_of_its_constants_as_well() -> None:
    shape = moe.MoEShape(4096, 128, 2048, (768, 768), 16, 2)
    other = replace(DEFAULT, moe=replace(DEFAULT.moe, most_columns=64))
    assert moe.plan_path(shape, None) is moe.MoEPath.ONE_SHOT
    assert moe.plan_path(replace(shape, tuning=other), None) is moe.MoEPath.TWO_KERNEL
