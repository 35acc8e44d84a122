"""A linear layer gives the same integers for every plan, and for outputs of any strides.

Plans are tuned on a GPU. Here they are forced, so that the tests cover the same code when the
plans change.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from loragate.core.machine import detect_machine, select_interpreter

select_interpreter()

from loragate.inputs.placement import Band, bits_of, owned, place, whole  # noqa: E402
from loragate.matrix.case import Layout  # noqa: E402
from lorakernels.batch.metadata import BatchMetadata  # noqa: E402
from lorakernels.dense import launch as launches  # noqa: E402
from lorakernels.dense.launch import TileTables, launch_expand, launch_shrink  # noqa: E402
from lorakernels.dense.shape import DenseShape  # noqa: E402
from lorakernels.dense.sizes import plan_shrunk  # noqa: E402
from lorakernels.dense.weights import LoRAFactors, SlotWeights  # noqa: E402

DEVICE = torch.device(detect_machine().device)
# blocks of 16 columns, ranks and inputs divide nothing
IN, WIDTHS, RANK = 40, (40, 8, 24), 20
# rank and scale of each slot and slice
ADAPTERS = (
    ((20, 1.0), (3, 2.0), None),
    ((5, 0.5), (20, 1.0), (1, 4.0)),
    (None, (18, 2.0), (20, 0.5)),
)


@dataclass(frozen=True, slots=True)
class _Plan:
    """Fields of the plans that are forced; anything else is as planned."""

    shrink: Mapping[str, Any] = field(default_factory=dict)
    expand: Mapping[str, Any] = field(default_factory=dict)
    rows: int = 20
    # of the tile axis; None: as planned
    programs: int | None = None
    layout: Layout = Layout.COLUMN_SLICE


_ONE = {"block_n": 16, "group": 1}
PLANS: Mapping[str, _Plan] = {
    "K in three parts": _Plan({"block_k": 16, "splits": 3}),
    "K in two parts of three steps": _Plan({"block_k": 16, "splits": 2}),
    "chunks of 32 ranks": _Plan({"block_n": 32}),
    "one block of columns a program": _Plan(expand=_ONE, layout=Layout.TRANSPOSED),
    "groups of two blocks": _Plan(expand={"block_n": 16, "group": 2, "block_r": 32}),
    "groups of three blocks": _Plan(
        expand={"block_n": 16, "group": 3, "block_r": 32}, layout=Layout.TRANSPOSED
    ),
    "two blocks of ranks": _Plan(expand=_ONE | {"block_r": 16}),
    "two blocks of ranks of sums in three parts": _Plan(
        {"block_k": 16, "splits": 3}, _ONE | {"block_r": 16}
    ),
    "a stride loop of one program": _Plan(expand=_ONE, programs=1),
    "two parts of each tile": _Plan(expand=_ONE | {"block_m": 16}, rows=140, programs=1),
    "as planned, transposed": _Plan(layout=Layout.TRANSPOSED),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("name", list(PLANS))
def test_every_plan_gives_the_same_integers_and_writes_nothing_else(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = PLANS[name]
    step = _Step(plan.rows, dtype)
    out = place(step.base.clone(), plan.layout, margin=16, band=Band.NUMBER)
    before = whole(out).clone()
    for planner, fields in (("plan_shrink", plan.shrink), ("plan_expand", plan.expand)):
        monkeypatch.setattr(launches, planner, _forcing(getattr(launches, planner), fields))
    if plan.programs is not None:
        monkeypatch.setattr(launches, "tile_programs", lambda shape, capacity: plan.programs)
    step.run(out, plan.shrink.get("splits", 1))
    assert torch.equal(bits_of(out + 0.0), bits_of(step.wanted() + 0.0))
    changed = (bits_of(whole(out)) != bits_of(before)) & ~owned(out)
    assert not changed.any()


def _forcing(planner: Callable[[DenseShape], Any], fields: Mapping[str, Any]) -> Callable[..., Any]:
    # all other fields are as planned; one split, unless a plan asks for more
    first = {"splits": 1} if planner.__name__ == "plan_shrink" else {}
    return lambda shape: replace(planner(shape), **(first | dict(fields)))


class _Step:
    """Every number is a small integer or a half."""

    def __init__(self, rows: int, dtype: torch.dtype) -> None:
        self.generator = torch.Generator().manual_seed(7)
        self.slots = torch.arange(rows, dtype=torch.int32) % (len(ADAPTERS) + 1) - 1
        self.x = self._sparse(rows, IN, 6).to(dtype)
        self.base = torch.randint(-3, 4, (rows, sum(WIDTHS)), generator=self.generator)
        self.base = self.base.to(dtype).to(DEVICE)
        self.weights = SlotWeights(
            num_slots=len(ADAPTERS),
            slice_widths=WIDTHS,
            in_features=IN,
            rank=RANK,
            dtype=dtype,
            device=DEVICE,
        )
        self.factors = [
            [self._factors(width, part) for width, part in zip(WIDTHS, parts, strict=True)]
            for parts in ADAPTERS
        ]
        for slot, parts in enumerate(self.factors):
            self.weights.load(slot, parts)
        self._poison()
        self.batch = BatchMetadata(max_tokens=rows, max_slots=len(ADAPTERS), device=DEVICE)
        self.batch.prepare(self.slots)

    def run(self, out: Tensor, splits: int) -> None:
        shape = DenseShape(len(self.x), IN, WIDTHS, RANK, self.x.element_size())
        size = (splits, *plan_shrunk(shape, len(ADAPTERS))[1:])
        shrunk = torch.full(size, float("nan"), device=DEVICE)
        tables, slots = TileTables.of(self.batch), self.weights.tensors
        launch_shrink(self.x, slots, shape, tables, shrunk, pdl=False)
        launch_expand(shrunk, slots, shape, tables, out, pdl=False)

    def wanted(self) -> Tensor:
        result = self.base.double()
        for slot, parts in enumerate(self.factors):
            mine, column = (self.slots == slot).to(DEVICE), 0
            for width, part in zip(WIDTHS, parts, strict=True):
                if part is not None:
                    delta = self.x[mine].double() @ part.a.double().T @ part.b.double().T
                    result[mine, column : column + width] += part.scale * delta
                column += width
        return result.to(self.base.dtype)

    def _factors(self, width: int, part: tuple[int, float] | None) -> LoRAFactors | None:
        if part is None:
            return None
        rank, scale = part
        a = torch.randint(0, 2, (rank, IN), generator=self.generator).to(DEVICE) * 2.0 - 1
        return LoRAFactors(a, self._sparse(width, rank, 2), scale)

    def _poison(self) -> None:
        """Ranks that no adapter has are NaN, as far as tensors may hold anything there."""
        for slot, parts in enumerate(ADAPTERS):
            for index, part in enumerate(parts):
                rank, start = 0 if part is None else part[0], sum(WIDTHS[:index])
                self.weights.a[slot, index, rank:] = float("nan")
                # B is read in vectors of four ranks
                columns = slice(start, start + WIDTHS[index])
                self.weights.b[slot, columns, -(-rank // 4) * 4 :] = float("nan")

    def _sparse(self, rows: int, columns: int, count: int) -> Tensor:
        """Signs in `count` of the columns of each row, always in the last one."""
        order = torch.rand(rows, columns, generator=self.generator).argsort(1)
        order[:, 0] = columns - 1
        order = order[:, :count]
        signs = torch.randint(0, 2, order.shape, generator=self.generator) * 2.0 - 1
        return torch.zeros(rows, columns).scatter_(1, order, signs).to(DEVICE)
