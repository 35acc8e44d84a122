"""No launch for experts has programs that have nothing to do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from lorakernels.common.stacked_weights import SlotTensors
from lorakernels.moe.align.metadata import PairMetadata
from lorakernels.moe.delta import launch
from lorakernels.moe.delta.launch import Delta, shape_of
from lorakernels.moe.delta.plan import plan_expand

EXPERTS, SLOTS, RANK, ROWS = 4, 2, 16, 8


class Grids:
    """Stands for a kernel and keeps the grids that it is launched with."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        self.seen.append(grid)
        return lambda *args, **options: None


def delta_of(widths: tuple[int, ...]) -> Delta:
    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(shape, device="meta", dtype=torch.bfloat16)

    a, b = (
        empty(SLOTS, EXPERTS, len(widths), RANK, 32),
        empty(SLOTS, EXPERTS, sum(widths), RANK),
    )
    pairs = PairMetadata(
        max_tokens=ROWS, top_k=2, num_experts=EXPERTS, max_slots=SLOTS, device="meta"
    )
    return Delta(
        shape=shape_of(a, widths, num_pairs=2 * ROWS, num_experts=EXPERTS),
        x=empty(ROWS, 32),
        pairs_per_x=2,
        slots=SlotTensors(a, b, empty(SLOTS, len(widths)), empty(SLOTS, len(widths))),
        tables=pairs.tables.tables,
        shrunk=empty(1, 2 * ROWS, len(widths) * RANK),
        out=empty(2 * ROWS, sum(widths)),
        router_weights=None,
        add_inputs=True,
    )


@pytest.mark.parametrize("group", [1, 2, 3])
@pytest.mark.parametrize("widths", [(64,), (100, 36), (16, 16)])
def test_an_expand_has_as_many_programs_as_groups_of_columns(
    widths: tuple[int, ...], group: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    grids, delta = Grids(), delta_of(widths)
    plan = replace(plan_expand(delta.shape), block_n=16, group=group)
    monkeypatch.setattr(launch, "plan_expand", lambda shape: plan)
    monkeypatch.setattr(launch, "moe_expand_kernel", grids)
    launch.expand(delta, pdl=False)
    ((programs, _),) = grids.seen
    starts = [start for width in widths for start in range(0, width, 16 * group)]
    assert programs == len(starts)


def tables_of(tokens: int) -> Any:
    return PairMetadata(
        max_tokens=tokens, top_k=1, num_experts=EXPERTS, max_slots=SLOTS, device="meta"
    ).tables


def test_few_programs_reset_small_tables_and_never_more_than_are_of_use() -> None:
    small, large = tables_of(8), tables_of(100_000)
    assert small.reset_programs == 1
    most = large.tuning.align.most_reset_programs
    assert large.reset_programs == most
    sizes = [tables_of(tokens).reset_programs for tokens in (1000, 2000, 4000, 8000)]
    assert sizes == sorted(set(sizes))
    assert 1 < sizes[0] < sizes[-1] < most
