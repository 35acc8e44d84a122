"""A MoE kernel gives the same result for every plan: tiles, groups, parts, split-K partials.

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
from lorakernels.moe.align.metadata import PairMetadata  # noqa: E402
from lorakernels.moe.delta import launch as launches  # noqa: E402
from lorakernels.moe.delta.launch import Delta, launch  # noqa: E402
from lorakernels.moe.delta.plan import MoEPath, MoEShape  # noqa: E402
from lorakernels.moe.weights import ExpertFactors, ExpertWeights  # noqa: E402

_TOP_K, _EXPERTS, _SLOTS = 2, 2, 3
_GUARD_COLUMNS = 16


@dataclass(frozen=True, slots=True)
class _Layer:
    """The sizes of a layer, and rank and scale of each slot and slice."""

    widths: tuple[int, int]
    rank: int
    adapters: tuple[tuple[tuple[int, float] | None, ...], ...]
    tokens: int = 10
    in_features: int = 40


# one slice is absent; blocks of 16 columns and of 16 ranks divide nothing
_UNEVEN = _Layer((72, 72), 20, (((20, 1.0), (3, 2.0)), ((5, 0.5), (20, 1.0)), ((18, 2.0), None)))
# blocks of 16 divide the widths, and one holds the ranks
_EVEN = _Layer((80, 80), 12, (((12, 1.0), (3, 2.0)), ((5, 0.5), (12, 1.0)), ((10, 2.0), None)))
# so many pairs that their tiles are tall
_TALL = _Layer((24, 24), 4, (((4, 1.0), (3, 2.0)), ((2, 0.5), None), ((4, 2.0), (1, 1.0))), 512)


@dataclass(frozen=True, slots=True)
class _Plan:
    """Fields of the plans that are forced; anything else is as planned."""

    path: MoEPath
    fields: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


_TWO = MoEPath.TWO_KERNEL
_PLANS: Mapping[str, _Plan] = {
    "K in three parts": _Plan(_TWO, {"plan_shrink": {"block_k": 16, "splits": 3}}),
    "K in two parts of three steps": _Plan(_TWO, {"plan_shrink": {"block_k": 16, "splits": 2}}),
    "one block of columns a program": _Plan(_TWO, {"plan_expand": {"block_n": 16, "group": 1}}),
    "groups of two blocks": _Plan(_TWO, {"plan_expand": {"block_n": 16, "group": 2}}),
    "groups of three blocks": _Plan(_TWO, {"plan_expand": {"block_n": 16, "group": 3}}),
    "two blocks of ranks": _Plan(_TWO, {"plan_expand": {"block_r": 16, "group": 1}}),
    "two blocks of ranks of sums in three parts": _Plan(
        _TWO,
        {
            "plan_shrink": {"block_k": 16, "splits": 3},
            "plan_expand": {"block_r": 16, "group": 1},
        },
    ),
    "one shot": _Plan(
        MoEPath.ONE_SHOT, {"plan_one_shot": {"block_n": 16, "parts": 1, "paired": False}}
    ),
    "one shot in two parts of three blocks": _Plan(
        MoEPath.ONE_SHOT, {"plan_one_shot": {"block_n": 16, "parts": 2, "paired": False}}
    ),
    "one shot in four parts, one of them empty": _Plan(
        MoEPath.ONE_SHOT, {"plan_one_shot": {"block_n": 16, "parts": 4, "paired": False}}
    ),
    "both slices in one program": _Plan(
        MoEPath.ONE_SHOT,
        {"plan_one_shot": {"block_n": 16, "block_k": 16, "parts": 1, "paired": True}},
    ),
    "small batch": _Plan(MoEPath.SMALL_BATCH, {"plan_small_batch": {"block_n": 16}}),
}


@pytest.fixture(scope="module", params=[_UNEVEN, _EVEN], ids=["uneven", "even"])
def step(request: pytest.FixtureRequest) -> _Step:
    return _Step(request.param)


@pytest.mark.parametrize("layout", [Layout.COLUMN_SLICE, Layout.TRANSPOSED])
@pytest.mark.parametrize("name", list(_PLANS))
def test_every_plan_gives_the_same_integers_and_writes_nothing_else(
    name: str, layout: Layout, step: _Step, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = _PLANS[name]
    # every kernel both stores and adds to its inputs
    add_inputs = list(_PLANS).index(name) % 2 > 0
    out = place(step.base.clone(), layout, margin=_GUARD_COLUMNS, band=Band.NUMBER)
    before, wanted = whole(out).clone(), step.wanted(add_inputs=add_inputs)
    for planner, fields in plan.fields.items():
        monkeypatch.setattr(launches, planner, _forcing(getattr(launches, planner), fields))
    splits = plan.fields.get("plan_shrink", {}).get("splits", 1)
    launch(step.delta(out, splits, add_inputs=add_inputs), plan.path, pdl=False)
    assert torch.equal(bits_of(out + 0.0), bits_of(wanted + 0.0))
    changed = (bits_of(whole(out)) != bits_of(before)) & ~owned(out)
    assert not changed.any()


def test_tall_tiles_of_few_ranks_reach_all_of_their_columns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    step = _Step(_TALL)
    assert step.pairs.tables.height > 32
    fields = {"block_n": 16, "parts": 1, "paired": False}
    monkeypatch.setattr(launches, "plan_one_shot", _forcing(launches.plan_one_shot, fields))
    out = step.base.clone()
    launch(step.delta(out, 1, add_inputs=True), MoEPath.ONE_SHOT, pdl=False)
    assert torch.equal(bits_of(out + 0.0), bits_of(step.wanted(add_inputs=True) + 0.0))


# plans whose kernels read the input in blocks, and the planner of these blocks
_READERS = {
    "K in three parts": "plan_shrink",
    "K in two parts of three steps": "plan_shrink",
    "one shot": "plan_one_shot",
    "both slices in one program": "plan_one_shot",
    "small batch": "plan_small_batch",
}


@pytest.mark.parametrize("in_features", [32, 33])
@pytest.mark.parametrize("name", list(_READERS))
def test_a_kernel_reads_all_features_of_an_input_around_those_of_its_blocks(
    name: str, in_features: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, planner = _PLANS[name], _READERS[name]
    step = _Step(replace(_EVEN, in_features=in_features))
    fields = {**plan.fields[planner], "block_k": 16}
    monkeypatch.setattr(launches, planner, _forcing(getattr(launches, planner), fields))
    out = step.base.clone()
    launch(step.delta(out, fields.get("splits", 1), add_inputs=True), plan.path, pdl=False)
    assert torch.equal(bits_of(out + 0.0), bits_of(step.wanted(add_inputs=True) + 0.0))


def _forcing(planner: Callable[[MoEShape], Any], fields: Mapping[str, Any]) -> Callable[..., Any]:
    # all other fields are as planned
    return lambda shape: replace(planner(shape), **fields)


class _Step:
    """bf16; every number is a small integer or a half."""

    def __init__(self, layer: _Layer) -> None:
        self.layer = layer
        self.device = torch.device(detect_machine().device)
        self.generator = torch.Generator().manual_seed(7)
        self.slots = torch.arange(self.layer.tokens, dtype=torch.int32) % (_SLOTS + 1) - 1
        # of two choices one is always expert 0, in either place
        self.ids = torch.tensor([[0, 1], [1, 0]] * (self.layer.tokens // 2), dtype=torch.int32)
        self.router = self._integers(1, 3, self.layer.tokens, _TOP_K).float()
        self.x = self._sparse(layer.tokens, layer.in_features, 6)
        self.base = self._integers(-3, 4, self.layer.tokens * _TOP_K, sum(layer.widths)).bfloat16()
        self.weights = ExpertWeights(
            num_slots=_SLOTS,
            num_experts=_EXPERTS,
            slice_widths=layer.widths,
            in_features=layer.in_features,
            rank=layer.rank,
            dtype=torch.bfloat16,
            device=self.device,
        )
        self.factors = [[self._factors(part) for part in parts] for parts in layer.adapters]
        for slot, parts in enumerate(self.factors):
            self.weights.load(slot, parts)
        self._poison()
        batch = BatchMetadata(max_tokens=self.layer.tokens, max_slots=_SLOTS, device=self.device)
        batch.prepare(self.slots)
        self.pairs = PairMetadata(
            max_tokens=self.layer.tokens,
            top_k=_TOP_K,
            num_experts=_EXPERTS,
            max_slots=_SLOTS,
            device=self.device,
        )
        self.pairs.prepare(self.ids.to(self.device), batch)

    def delta(self, out: Tensor, splits: int, *, add_inputs: bool) -> Delta:
        weights, pairs, layer = self.weights, self.pairs, self.layer
        num_pairs = self.layer.tokens * _TOP_K
        shrunk = torch.full((splits, num_pairs, len(layer.widths) * layer.rank), float("nan"))
        return Delta(
            shape=MoEShape(num_pairs, _EXPERTS, layer.in_features, layer.widths, layer.rank, 2),
            x=self.x,
            pairs_per_x=_TOP_K,
            slots=weights.tensors,
            tables=pairs.tables.tables,
            shrunk=shrunk.to(self.device),
            out=out,
            router_weights=self.router.to(self.device),
            add_inputs=add_inputs,
        )

    def wanted(self, *, add_inputs: bool) -> Tensor:
        result = self.base.double()
        for pair in range(len(result)):
            token, choice = divmod(pair, _TOP_K)
            slot, column = int(self.slots[token]), 0
            for part, width in enumerate(self.layer.widths):
                factors = self.factors[slot][part] if slot >= 0 else None
                if factors is not None:
                    expert = int(self.ids[token, choice])
                    a, b = factors.a[expert].double(), factors.b[expert].double()
                    delta = self.x[token].double() @ a.T @ b.T * factors.scale
                    delta *= float(self.router[token, choice])
                    mine = result[pair, column : column + width]
                    mine.copy_(mine + delta if add_inputs else delta)
                column += width
        return result.to(torch.bfloat16)

    def _factors(self, adapter: tuple[int, float] | None) -> ExpertFactors | None:
        if adapter is None:
            return None
        rank, scale = adapter
        a = self._integers(0, 2, _EXPERTS, rank, self.layer.in_features) * 2 - 1
        width = self.layer.widths[0]
        b = self._sparse(_EXPERTS * width, rank, 2).view(_EXPERTS, width, rank)
        return ExpertFactors(a.bfloat16(), b, scale)

    def _poison(self) -> None:
        """Ranks that no adapter has are NaN, as far as kernels promise not to read them."""
        widths = self.layer.widths
        for slot, parts in enumerate(self.layer.adapters):
            for part, adapter in enumerate(parts):
                rank = 0 if adapter is None else adapter[0]
                columns = slice(sum(widths[:part]), sum(widths[: part + 1]))
                self.weights.a[slot, :, part, rank:] = float("nan")
                # B is read in vectors of four ranks
                self.weights.b[slot, :, columns, -(-rank // 4) * 4 :] = float("nan")

    def _integers(self, low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=self.generator).to(self.device)

    def _sparse(self, rows: int, columns: int, count: int) -> Tensor:
        """Signs in `count` of the columns of each row, always in the last one."""
        order = torch.rand(rows, columns, generator=self.generator).argsort(1)
        order[:, 0] = columns - 1
        values = (self._integers(0, 2, rows, count) * 2 - 1).bfloat16()
        result = torch.zeros(rows, columns, dtype=torch.bfloat16, device=self.device)
        return result.scatter_(1, order[:, :count].to(self.device), values)
