"""Tests of the MoE kernels and layer, in the usual style.

Habits: tolerances of 1e-2 for kernels and 2e-2 for high ranks, alpha of 1, every adapter enabled,
base rows only in tests of their own; for a layer constant factors and 5e-2. There are fewer
tokens, experts and columns than upstream; a row has the same 2048 values. All paths get the tests
that upstream has for one of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor
from torch.nn import functional as F

from loragate.core.machine import detect_machine
from loragate.faults.baseline_suite.data import assert_close, drawn_adapters, rand
from lorakernels.batch.metadata import BatchMetadata
from lorakernels.layers.gate_up import GateUp
from lorakernels.layers.moe import FusedMoELoRA, MoEScratch
from lorakernels.layers.moe_partition import MoERank
from lorakernels.moe.align.metadata import PairMetadata
from lorakernels.moe.delta.ops import MoEPath, MoEWorkspace, moe_delta
from lorakernels.moe.weights import ExpertFactors, ExpertWeights

_CLOSE, _HIGH_RANK_CLOSE, _LAYER_CLOSE = 1e-2, 2e-2, 5e-2


@dataclass(frozen=True, slots=True)
class _Setting:
    tokens: int
    top_k: int
    experts: int
    adapters: int
    rank: int
    slices: int
    dtype: torch.dtype = torch.float16
    width: int = 176
    hidden: int = 2048
    routed: bool = False


_SORTED = (
    _Setting(25, 3, 8, adapters=4, rank=16, slices=2),
    _Setting(25, 3, 8, adapters=6, rank=32, slices=1, routed=True),
    _Setting(16, 2, 8, adapters=4, rank=4, slices=1, dtype=torch.bfloat16),
)
_NAIVE = (
    _Setting(1, 2, 16, adapters=4, rank=16, slices=2),
    _Setting(8, 1, 16, adapters=8, rank=32, slices=1, dtype=torch.bfloat16),
)
_HIGH_RANK = (_Setting(8, 2, 4, adapters=2, rank=256, slices=1, width=256, hidden=256),)


def _sorted() -> None:
    for setting in _SORTED:
        for path in (MoEPath.TWO_KERNEL, MoEPath.ONE_SHOT):
            _kernel(setting, path, _CLOSE)


def _naive() -> None:
    for setting in _NAIVE:
        _kernel(setting, MoEPath.SMALL_BATCH, _CLOSE)


def _high_rank() -> None:
    for setting in _HIGH_RANK:
        for add_inputs in (True, False):
            _kernel(setting, None, _HIGH_RANK_CLOSE, add_inputs=add_inputs)


def _kernel(
    setting: _Setting, path: MoEPath | None, tolerance: float, *, add_inputs: bool = True
) -> None:
    step = _Step(setting)
    columns = setting.slices * setting.width
    # only the tests of high ranks add to an output that is not zero
    out = torch.zeros(step.num_pairs, columns, dtype=setting.dtype, device=step.x.device)
    if setting.rank > 128:
        out += rand(step.num_pairs, columns, dtype=setting.dtype)
    wanted = step.reference(out.clone(), add_inputs=add_inputs)
    step.run(out, path, add_inputs=add_inputs)
    assert_close(out, wanted, tolerance)


def _base_rows() -> None:
    """A batch without adapters after one with them leaves the output as it was."""
    for path in (None, *MoEPath):
        step = _Step(_Setting(8, 2, 8, adapters=2, rank=16, slices=1, hidden=128))
        before = rand(step.num_pairs, step.setting.width, dtype=step.setting.dtype)
        step.run(before.clone(), path, add_inputs=True)
        step.slots.fill_(-1)
        out = before.clone()
        step.run(out, path, add_inputs=True)
        assert torch.equal(out, before), "the output of base rows was changed"


def _align() -> None:
    """Every pair of a tile is of the tile's expert and adapter."""
    for tokens, experts, adapters in ((100, 64, 2), (200, 16, 32)):
        ids = torch.stack([torch.randperm(experts)[:6] for _ in range(tokens)]).int()
        slots = drawn_adapters(adapters, tokens).int()
        device = detect_machine().device
        batch = BatchMetadata(max_tokens=tokens, max_slots=adapters, device=device)
        batch.prepare(slots)
        pairs = PairMetadata(
            max_tokens=tokens, top_k=6, num_experts=experts, max_slots=adapters, device=device
        )
        pairs.prepare(ids.to(device), batch)
        height = pairs.tables.height
        tiles = pairs.tile_pairs.cpu()[: int(pairs.num_tiles) * height]
        for tile, members in enumerate(tiles.view(-1, height)):
            live = members[members >= 0].long()
            assert (ids.flatten()[live] == int(pairs.tile_experts[tile])).all()
            assert (slots[live // 6] == int(pairs.tile_slots[tile])).all()


def _layer() -> None:
    """Constant factors, on one rank and cut over two, whose outputs are added up."""
    for tokens, top_k, experts, rank in ((32, 1, 8, 8), (12, 2, 8, 16)):
        for tp_size in (1, 2):
            _layer_of(tokens, top_k, experts, rank, tp_size)


def _layer_of(tokens: int, top_k: int, experts: int, rank: int, tp_size: int) -> None:
    hidden, inter, slots = 64, 48, 2
    dtype, device = torch.float32, torch.device(detect_machine().device)
    # outputs of about 10, so that the tolerance is a relative one
    w13 = rand(experts, 2 * inter, hidden, dtype=dtype) / hidden**0.5
    w2 = rand(experts, hidden, inter, dtype=dtype) / inter**0.5
    x, ids = rand(tokens, hidden, dtype=dtype), _routes(tokens, top_k, experts)
    router = torch.rand(tokens, top_k).softmax(-1).to(device)
    mapping = drawn_adapters(slots + 1, tokens).int()
    parts = [_constant(experts, hidden, inter, rank, 0.05 * (slot + 1)) for slot in range(slots)]
    total = torch.zeros(tokens, hidden, dtype=dtype, device=device)
    for tp_rank in range(tp_size):
        layer = FusedMoELoRA(
            w13,
            w2,
            gate_up=GateUp.HALVES,
            num_slots=slots,
            rank=rank,
            place=MoERank(tp_size=tp_size, tp_rank=tp_rank),
        )
        for slot, factors in enumerate(parts):
            layer.load_adapter(slot, factors)
        batch = BatchMetadata(max_tokens=tokens, max_slots=slots, device=device)
        batch.prepare(mapping)
        pairs = PairMetadata(
            max_tokens=tokens,
            top_k=top_k,
            num_experts=experts,
            max_slots=slots,
            device=device,
            with_base=True,
        )
        scratch = MoEScratch([layer], max_tokens=tokens, top_k=top_k)
        total += layer(x, ids, router, batch, pairs, scratch)
    wanted = torch.zeros_like(total)
    for token in range(tokens):
        own = parts[int(mapping[token])]
        gate_a, up_a, down_a = (own[f"experts.{name}"] for name in _GATED)
        for choice in range(top_k):
            e = int(ids[token, choice])
            first = torch.cat([gate_a.b[e] @ gate_a.a[e], up_a.b[e] @ up_a.a[e]]) + w13[e]
            gate, up = (first @ x[token]).chunk(2)
            second = w2[e] + down_a.b[e] @ down_a.a[e]
            wanted[token] += router[token, choice] * (second @ (F.silu(gate) * up))
    assert_close(total, wanted, _LAYER_CLOSE)


_GATED = ("gate_proj", "up_proj", "down_proj")


def _constant(
    experts: int, hidden: int, inter: int, rank: int, value: float
) -> dict[str, ExpertFactors]:
    parts = {}
    for name in _GATED:
        inputs, width = (inter, hidden) if name == "down_proj" else (hidden, inter)
        device = detect_machine().device
        a = torch.full((experts, rank, inputs), value, device=device)
        b = torch.full((experts, width, rank), value, device=device)
        parts[f"experts.{name}"] = ExpertFactors(a, b, 1.0)
    return parts


def _routes(tokens: int, top_k: int, experts: int) -> Tensor:
    """int32 [tokens, top_k], the experts of a token all different."""
    ids = torch.stack([torch.randperm(experts)[:top_k] for _ in range(tokens)])
    return ids.int().to(detect_machine().device)


class _Step:
    def __init__(self, setting: _Setting) -> None:
        self.setting = setting
        device = detect_machine().device
        self.num_pairs = setting.tokens * setting.top_k
        self.slots = drawn_adapters(setting.adapters, setting.tokens).int()
        self.ids = _routes(setting.tokens, setting.top_k, setting.experts)
        self.router = torch.rand(setting.tokens, setting.top_k).softmax(-1).to(device)
        self.x = rand(setting.tokens, setting.hidden, dtype=setting.dtype)
        self.weights = ExpertWeights(
            num_slots=setting.adapters,
            num_experts=setting.experts,
            slice_widths=(setting.width,) * setting.slices,
            in_features=setting.hidden,
            rank=setting.rank,
            dtype=setting.dtype,
            device=device,
        )
        for slot in range(setting.adapters):
            self.weights.load(slot, [self._part() for _ in range(setting.slices)])
        self.batch = BatchMetadata(
            max_tokens=setting.tokens, max_slots=setting.adapters, device=device
        )
        self.pairs = PairMetadata(
            max_tokens=setting.tokens,
            top_k=setting.top_k,
            num_experts=setting.experts,
            max_slots=setting.adapters,
            device=device,
        )
        self.workspace = MoEWorkspace(
            [self.weights], max_tokens=setting.tokens, top_k=setting.top_k
        )

    def run(self, out: Tensor, path: MoEPath | None, *, add_inputs: bool) -> None:
        self.batch.prepare(self.slots)
        self.pairs.prepare(self.ids, self.batch)
        moe_delta(
            self.x,
            self.weights,
            self.pairs,
            self.workspace,
            out,
            router_weights=self.router if self.setting.routed else None,
            add_inputs=add_inputs,
            path=path,
        )

    def reference(self, out: Tensor, *, add_inputs: bool) -> Tensor:
        setting = self.setting
        for pair in range(self.num_pairs):
            token, choice = divmod(pair, setting.top_k)
            slot, expert = int(self.slots[token]), int(self.ids[token, choice])
            for part in range(setting.slices):
                columns = slice(part * setting.width, (part + 1) * setting.width)
                h = self.x[token] @ self.weights.a[slot, expert, part].T
                delta = h @ self.weights.b[slot, expert, columns].T
                if setting.routed:
                    delta = delta * self.router[token, choice].to(delta.dtype)
                out[pair, columns] = out[pair, columns] + delta if add_inputs else delta
        return out

    def _part(self) -> ExpertFactors:
        setting = self.setting
        a = rand(setting.experts, setting.rank, setting.hidden, dtype=setting.dtype)
        b = rand(setting.experts, setting.width, setting.rank, dtype=setting.dtype)
        return ExpertFactors(a, b, 1.0)


TESTS: Mapping[str, Callable[[], None]] = MappingProxyType(
    {
        "sorted MoE kernels": _sorted,
        "naive MoE kernel": _naive,
        "high MoE ranks": _high_rank,
        "MoE base rows": _base_rows,
        "MoE alignment": _align,
        "MoE layer": _layer,
    }
)
