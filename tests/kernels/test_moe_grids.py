"""Grids of batches and layers far beyond what the interpreter can run: nothing is launched."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from lorakernels.moe import specs
from lorakernels.moe.align import at_once as align_at_once
from lorakernels.moe.align import launch as align_launch
from lorakernels.moe.align import sort as align_sort
from lorakernels.moe.delta import launch as delta_launch
from lorakernels.moe.delta.plan import MoEPath
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
    for module in (align_at_once, align_launch, align_sort, delta_launch, layer_launch):
        for name in vars(module):
            if name.endswith("_kernel"):
                monkeypatch.setattr(module, name, grids)
    return grids


@pytest.mark.parametrize("tokens", [1, 5000, 2_000_000])
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
