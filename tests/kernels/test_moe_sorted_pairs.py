"""Pairs with more buckets than a program can count: the same tables, and no memory per bucket."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import groupby
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lorakernels.batch.metadata import BatchMetadata
from lorakernels.moe.align import ops
from lorakernels.moe.align import sort as align_sort
from lorakernels.moe.align.metadata import PairMetadata
from lorakernels.moe.align.tables import PairTables
from lorakernels.runtime import tuning


class Step:
    """A routed batch."""

    def __init__(self, rows: int, top_k: int, experts: int, slots: int) -> None:
        generator = torch.Generator().manual_seed(rows)
        self.ids = torch.randint(-1, experts, (rows, top_k), generator=generator).int()
        self.slots = torch.randint(-1, slots, (rows,), generator=generator).int()

    def prepare(self, pairs: PairMetadata, expert_map: Tensor | None) -> list[Tensor]:
        """The tables, without scratch memory."""
        batch = BatchMetadata(max_tokens=150, max_slots=pairs.max_slots, device="cpu")
        batch.prepare(self.slots)
        pairs.prepare(self.ids, batch, expert_map=expert_map)
        return [table.clone() for table in pairs.buffers[:-1]]


def prepared(steps: list[Step], expert_map: Tensor | None, **sizes: Any) -> list[list[Tensor]]:
    pairs = PairMetadata(max_tokens=100, device="cpu", **sizes)
    for table in pairs.buffers:
        table.fill_(77)
    if not pairs.with_base:
        pairs.base_experts.fill_(-1), pairs.base_pairs.fill_(-1), pairs.num_base_tiles.zero_()
    return [step.prepare(pairs, expert_map) for step in steps]


def tune(monkeypatch: pytest.MonkeyPatch, **changed: int) -> None:
    align = replace(tuning.DEFAULT.align, **changed)
    monkeypatch.setattr(tuning, "DEFAULT", replace(tuning.DEFAULT, align=align))


@pytest.mark.parametrize(
    ("experts", "slots", "with_base", "is_mapped"),
    [(5, 3, False, True), (3, 1, True, False), (33, 4, True, True), (2, 8, False, False)],
)
def test_sorting_gives_the_tables_that_counting_gives(
    experts: int, slots: int, with_base: bool, is_mapped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = [Step(rows, 3, experts, slots) for rows in (100, 7, 0)]
    sizes = {"top_k": 3, "num_experts": experts, "max_slots": slots, "with_base": with_base}
    expert_map = torch.arange(experts).int().flip(0) if is_mapped else None
    if expert_map is not None:
        expert_map[1] = -1
    tune(monkeypatch, pairs_at_once=0, compared_pairs=0, span=32)
    counted = prepared(steps, expert_map, **sizes)
    tune(monkeypatch, pairs_at_once=0, compared_pairs=0, most_bins=0, span=32)
    for want, have in zip(counted, prepared(steps, expert_map, **sizes), strict=True):
        assert all(map(torch.equal, want, have))


@pytest.mark.parametrize("with_base", [False, True])
def test_large_batches_whose_counters_take_too_much_memory_are_sorted(
    with_base: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = [Step(rows, 3, 5, 3) for rows in (100, 7, 100, 0)]
    sizes = {"top_k": 3, "num_experts": 5, "max_slots": 3, "with_base": with_base}
    tune(monkeypatch, pairs_at_once=0, compared_pairs=0, span=32)
    counted = prepared(steps, None, **sizes)
    tune(monkeypatch, pairs_at_once=0, compared_pairs=0, span=32, most_counters=400)
    launched = []
    for name in ("launch_sorting", "launch_counting", "launch_sort_at_once"):
        monkeypatch.setattr(ops, name, noted(getattr(ops, name), launched))
    for want, have in zip(counted, prepared(steps, None, **sizes), strict=True):
        assert all(map(torch.equal, want, have))
    large, small = "launch_sorting", "launch_counting"
    # the step without pairs is small enough for any way
    # a plan that cannot be kept is made a second time when it is first met
    in_turn = [name for name, _ in groupby(launched)]
    assert in_turn == [large, small, large, "launch_sort_at_once"]


def noted(launch: Callable[..., None], launched: list[str]) -> Callable[..., None]:
    def run(*args: Any, **options: Any) -> None:
        launched.append(launch.__name__)
        launch(*args, **options)

    return run


def test_a_thousand_experts_and_sixty_four_slots_take_little_memory() -> None:
    step = Step(150, 8, 1024, 64)
    pairs = PairMetadata(
        max_tokens=150, top_k=8, num_experts=1024, max_slots=64, device="cpu", with_base=True
    )
    step.prepare(pairs, None)
    order = pairs.base_pairs[pairs.base_pairs >= 0]
    keys = pairs.pair_experts[order] * 65 + pairs.pair_slots[order] + 1
    assert keys.shape[0] == int((step.ids >= 0).sum())
    assert torch.equal(keys, keys.sort().values)
    # far less than one counter of each bucket for each span of pairs
    assert pairs.buffers[-1].shape[0] < 65 * 1024


class Operations(TorchDispatchMode):
    """The operations of torch meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.seen.add(str(operation))
        return operation(*args, **(kwargs or {}))


class NoKernel:
    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *_, **__: None


def test_many_buckets_are_aligned_without_an_operation_that_a_graph_cannot_hold(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in vars(align_sort):
        if name.endswith("_kernel"):
            monkeypatch.setattr(align_sort, name, NoKernel())
    pairs = PairMetadata(
        max_tokens=150, top_k=8, num_experts=1024, max_slots=64, device="cpu", with_base=True
    )
    tables = PairTables.of(pairs.buffers, 150, pairs.sizes)
    step = Step(150, 8, 1024, 64)
    with Operations() as operations:
        ops.fill_tables(tables, step.ids, step.slots, None, pdl=False)
    # a view needs neither memory nor a launch
    assert operations.seen <= {"aten.slice.Tensor"}
