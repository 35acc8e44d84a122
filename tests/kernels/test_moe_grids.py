"""Grids of batches and layers far beyond what the interpreter can run: nothing is launched."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from lorakernels.moe import specs
from lorakernels.moe.align import at_once as align_at_once
from lorakernels.moe.align import compared as align_compared
from lorakernels.moe.align import counted as align_counted
from lorakernels.moe.align import sort as align_sort
from lorakernels.moe.align.metadata import PairMetadata
from lorakernels.moe.align.tables import PairTables
from lorakernels.moe.delta import launch as delta_launch
from lorakernels.moe.delta.plan import ExpandPlan, MoEPath, MoEShape, plan_expand
from lorakernels.moe.layer import launch as layer_launch
from lorakernels.moe.specs import Problem, Sizes

# of CUDA
LIMITS = (2**31 - 1, 65535, 65535)
FEW: Sizes = (2048, (1536, 1536), 8, 8)
MANY: Sizes = (1024, (512, 512), 1024, 8)


class Grids:
    """In place of a kernel: the grids of its launches."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        self.seen.append(grid)
        return lambda *_, **__: None


@pytest.fixture
def grids(monkeypatch: pytest.MonkeyPatch) -> Grids:
    grids = Grids()
    aligning = (align_at_once, align_compared, align_counted, align_sort)
    for module in (*aligning, delta_launch, layer_launch):
        for name in vars(module):
            if name.endswith("_kernel"):
                monkeypatch.setattr(module, name, grids)
    return grids


@pytest.mark.parametrize("tokens", [1, 100, 5000, 2_000_000])
@pytest.mark.parametrize("sizes", [FEW, MANY], ids=["8-experts", "1024-experts"])
def test_the_grids_of_all_moe_launches_are_within_the_limits_of_cuda(
    sizes: Sizes, tokens: int, grids: Grids
) -> None:
    launches = [
        partial(specs.launch_align, tokens, True, sizes=sizes, slots=slots) for slots in (4, 64)
    ]
    for rank in (1, 64, 512):
        launches.append(partial(specs.launch_layer, tokens, rank, sizes=sizes))
        for path in MoEPath:
            problem = Problem("", *sizes, tokens, rank, path, torch.bfloat16)
            launches.append(partial(specs.launch_delta, problem))
    for launch in launches:
        launch(pdl=False)
    assert len(grids.seen) > len(launches)
    for grid in grids.seen:
        assert all(1 <= size <= most for size, most in zip(grid, LIMITS, strict=False)), grid


@pytest.mark.parametrize("group", [1, 2, 3])
@pytest.mark.parametrize("widths", [(64,), (100, 36), (16, 16)])
def test_an_expand_has_as_many_programs_as_groups_of_columns(
    widths: tuple[int, ...], group: int, grids: Grids, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forced(shape: MoEShape) -> ExpandPlan:
        return replace(plan_expand(shape), block_n=16, group=group)

    monkeypatch.setattr(delta_launch, "plan_expand", forced)
    problem = Problem("", 32, widths, 4, 2, 8, 16, MoEPath.TWO_KERNEL, torch.bfloat16)
    specs.launch_delta(problem, pdl=False)
    starts = [start for width in widths for start in range(0, width, 16 * group)]
    # the last launch
    assert grids.seen[-1][0] == len(starts)


def tables_of(tokens: int) -> PairTables:
    sizes = {"top_k": 1, "num_experts": 4, "max_slots": 2}
    return PairMetadata(max_tokens=tokens, device="meta", **sizes).tables


def test_few_programs_reset_small_tables_and_never_more_than_are_of_use() -> None:
    small, large = tables_of(8), tables_of(100_000)
    assert small.reset_programs == 1
    most = large.tuning.align.most_reset_programs
    assert large.reset_programs == most
    sizes = [tables_of(tokens).reset_programs for tokens in (1000, 2000, 4000, 8000)]
    assert sizes == sorted(set(sizes))
    assert 1 < sizes[0] < sizes[-1] < most
