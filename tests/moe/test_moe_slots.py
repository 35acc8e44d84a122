"""The part of the weights and of an adapter that a MoE layer keeps: complete and cut for its rank.

Every rank of a group is built in this process and its slots are applied in plain torch; the sum
over the ranks must equal the result of the whole tensors.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from lorakernels.dense.weights import LoRAFactors
from lorakernels.layers.expert_packing import ExpertParts
from lorakernels.layers.gate_up import GateUp
from lorakernels.layers.moe import FusedMoELoRA
from lorakernels.layers.moe_partition import MoERank
from lorakernels.moe.weights import ExpertFactors, ExpertWeights, Factors

EXPERTS, HIDDEN, INTERMEDIATE, RANK, SLOTS = 6, 10, 12, 5, 2
TOKENS, TOP_K = 9, 3
PLAIN = ("up_proj", "down_proj")
GATED = ("gate_proj", "up_proj", "down_proj")
Act = Callable[[Tensor], Tensor]


def randn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def base(projections: tuple[str, ...] = GATED) -> tuple[Tensor, Tensor]:
    rows = INTERMEDIATE * (len(projections) - 1)
    w13, w2 = randn(EXPERTS, rows, HIDDEN, seed=1), randn(EXPERTS, HIDDEN, INTERMEDIATE, seed=2)
    return w13.float(), w2.float()


def make(projections: tuple[str, ...] = GATED, **options: Any) -> FusedMoELoRA:
    fields = {"num_slots": SLOTS, "rank": RANK, "projections": projections} | options
    fields["gate_up"] = GateUp.HALVES if len(projections) == 3 else None
    return FusedMoELoRA(*base(projections), **fields)


def ends(projection: str) -> tuple[int, int]:
    down = projection == "down_proj"
    return (INTERMEDIATE, HIDDEN) if down else (HIDDEN, INTERMEDIATE)


def stacked(
    projections: tuple[str, ...] = GATED, *, rank: int = 3, shared: bool = False, seed: int = 10
) -> dict[str, ExpertFactors]:
    """Factors of all experts, different in each projection; with `shared` the outer ones once."""
    parts = {}
    for index, projection in enumerate(projections):
        inputs, width = ends(projection)
        a_experts, b_experts = (1, EXPERTS) if projection != "down_proj" else (EXPERTS, 1)
        a = randn(a_experts if shared else EXPERTS, rank, inputs, seed=seed + index)
        b = randn(b_experts if shared else EXPERTS, width, rank, seed=seed + 50 + index)
        parts[f"experts.{projection}"] = ExpertFactors(a.float(), b.float(), 0.5 + index)
    return parts


def numbered(parts: Mapping[str, ExpertFactors]) -> dict[str, LoRAFactors]:
    """The same adapter with a module for each expert."""
    return {
        name.replace("experts.", f"experts.{e}."): LoRAFactors(
            factors.a[e % factors.a.shape[0]], factors.b[e % factors.b.shape[0]], factors.scale
        )
        for name, factors in parts.items()
        for e in range(EXPERTS)
    }


def routing() -> tuple[Tensor, Tensor, Tensor]:
    x, scores = randn(TOKENS, HIDDEN, seed=3), randn(TOKENS, EXPERTS, seed=4)
    weights, ids = torch.topk(scores.softmax(dim=-1), TOP_K)
    return x, ids, weights


def activate(first: Tensor, num_up: int) -> Tensor:
    if num_up == 1:
        return F.silu(first)
    gate, up = first.chunk(2, dim=-1)
    return F.silu(gate) * up


def experts_sum(w13: Tensor, w2: Tensor, num_up: int, locate: Callable[[int], int]) -> Tensor:
    """sum of w * w2 @ act(w13 @ x) over the experts that `locate` does not put at -1."""
    out = torch.zeros(TOKENS, HIDDEN, dtype=torch.float64)
    for row, chosen, weights, total in zip(*routing(), out, strict=True):
        for expert, weight in zip(chosen, weights, strict=True):
            e = locate(int(expert))
            if e >= 0:
                total += weight * (w2[e] @ activate(w13[e] @ row, num_up))
    return out


def whole(parts: Mapping[str, ExpertFactors], projections: tuple[str, ...] = GATED) -> Tensor:
    """The definition: each weight plus its whole delta."""
    w13, w2 = (w.double() for w in base(projections))
    deltas = []
    for projection in projections:
        inputs, width = ends(projection)
        deltas.append(torch.zeros(EXPERTS, width, inputs, dtype=torch.float64))
        if f"experts.{projection}" in parts:
            factors = parts[f"experts.{projection}"]
            deltas[-1] += factors.scale * (factors.b.double() @ factors.a.double())
    num_up = len(projections) - 1
    return experts_sum(w13 + torch.cat(deltas[:-1], 1), w2 + deltas[-1], num_up, lambda e: e)


def merged(weight: Tensor, slots: ExpertWeights, slot: int) -> Tensor:
    """A rank's weight plus what is in a slot, contracted over the rank of the buffers."""
    rows = torch.repeat_interleave(slots.scales[slot], torch.tensor(slots.slice_widths)).double()
    a, b = slots.a[slot].double(), slots.b[slot].double()
    a = torch.cat(
        [a[:, s].expand(weight.shape[0], -1, -1)[:, None] for s in range(slots.num_slices)], 1
    )
    per_row = torch.repeat_interleave(a, torch.tensor(slots.slice_widths), dim=1)
    b = b.expand(weight.shape[0], -1, -1)
    return weight.double() + rows[:, None] * torch.einsum("eor,eori->eoi", b, per_row)


def partial(layer: FusedMoELoRA, slot: int) -> Tensor:
    """What one rank adds to the output, from its own tensors alone."""
    return experts_sum(
        merged(layer.w13, layer.w13_slots, slot),
        merged(layer.w2, layer.w2_slots, slot),
        layer.w13_slots.num_slices,
        lambda e: int(layer.routing.expert_map[e]),
    )


def group(ep: int, tp: int, **options: Any) -> list[FusedMoELoRA]:
    places = [MoERank.of_group(rank, ep_size=ep, tp_size=tp) for rank in range(ep * tp)]
    return [make(place=place, **options) for place in places]


def state(layer: FusedMoELoRA) -> list[Tensor]:
    return [
        tensor.clone()
        for slots in (layer.w13_slots, layer.w2_slots)
        for tensor in (slots.a, slots.b, slots.ranks, slots.scales)
    ]


def same(left: list[Tensor], right: list[Tensor]) -> bool:
    return all(torch.equal(*pair) for pair in zip(left, right, strict=True))


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("padded", [None, 16])
@pytest.mark.parametrize(("ep", "tp"), [(e, t) for e in (1, 2, 4) for t in (1, 2, 4)])
def test_the_ranks_of_a_group_add_up_to_the_whole_layer(
    ep: int, tp: int, padded: int | None, shared: bool
) -> None:
    # vllm #31994: below the rank of the buffers; sglang #24171: ranks with empty slices
    parts = stacked(shared=shared)
    layers = group(ep, tp, padded_intermediate=padded, shared_outer=shared)
    for layer in layers:
        layer.load_adapter(1, parts)
    torch.testing.assert_close(sum(partial(layer, 1) for layer in layers), whole(parts))
    torch.testing.assert_close(sum(partial(layer, 0) for layer in layers), whole({}))


def test_a_layer_without_a_gate_is_cut_the_same_way() -> None:
    parts = stacked(PLAIN)
    layers = group(2, 2, projections=PLAIN)
    for layer in layers:
        layer.load_adapter(0, parts)
    torch.testing.assert_close(sum(partial(layer, 0) for layer in layers), whole(parts, PLAIN))


@pytest.mark.parametrize("tp", [1, 2])
def test_modules_of_single_experts_and_a_stack_are_the_same_adapter(tp: int) -> None:
    parts = stacked()
    for one, other in zip(group(3, tp), group(3, tp), strict=True):
        one.load_adapter(1, parts)
        other.load_adapter(1, numbered(parts))
        assert same(state(one), state(other))


@pytest.mark.parametrize("ep", [1, 3])
def test_the_order_in_which_parts_are_given_does_not_matter(ep: int) -> None:
    # a file has its names sorted, in which experts.10 comes before experts.2
    parts = numbered(stacked())
    for one, other in zip(group(ep, 1), group(ep, 1), strict=True):
        one.load_adapter(0, parts)
        other.load_adapter(0, dict(reversed(parts.items())))
        assert same(state(one), state(other))


@pytest.mark.parametrize("shared", [False, True])
def test_gate_and_up_share_a_of_a_fused_module_and_take_their_own_rows_of_b(shared: bool) -> None:
    # unsloth-zoo #941: gate twice, up never; sglang #28564: the shared side overwritten
    a = randn(1 if shared else EXPERTS, 3, HIDDEN, seed=7).float()
    b = randn(EXPERTS, 2 * INTERMEDIATE, 3, seed=8).float()
    fused, split = make(shared_outer=shared), make(shared_outer=shared)
    fused.load_adapter(0, {"experts.gate_up_proj": ExpertFactors(a, b, 2.0)})
    gate, up = b.split(INTERMEDIATE, dim=1)
    split.load_adapter(
        0,
        {
            "experts.gate_proj": ExpertFactors(a, gate, 2.0),
            "experts.up_proj": ExpertFactors(a, up, 2.0),
        },
    )
    assert same(state(fused), state(split))
    assert torch.equal(fused.w13_slots.b[0, :, INTERMEDIATE:, :3], up)
    assert not fused.w2_slots.ranks.any()


@pytest.mark.parametrize("tp", [1, 2])
def test_an_adapter_can_be_loaded_any_number_of_times(tp: int) -> None:
    # vllm #20873: the second activation cut what the first one had cut already
    parts = stacked()
    before = {name: (p.a.clone(), p.b.clone()) for name, p in parts.items()}
    layer = group(2, tp)[-1]
    layer.load_adapter(0, parts)
    first = state(layer)
    for _ in range(2):
        layer.unload(0)
        assert not any(tensor.any() for tensor in state(layer))
        layer.load_adapter(0, parts)
        assert same(state(layer), first)
    for name, factors in parts.items():
        assert torch.equal(factors.a, before[name][0])
        assert torch.equal(factors.b, before[name][1])
        inside = [layer.w13_slots.a, layer.w13_slots.b, layer.w2_slots.a, layer.w2_slots.b]
        assert {t.untyped_storage().data_ptr() for t in inside}.isdisjoint(
            t.untyped_storage().data_ptr() for t in (factors.a, factors.b)
        )


def test_nothing_of_a_predecessor_stays_in_a_slot() -> None:
    # sglang #8103: projections that the new adapter does not have keep the old factors
    layer, clean = make(), make()
    layer.load_adapter(1, stacked(rank=5))
    small = {"experts.up_proj": stacked(rank=2, seed=30)["experts.up_proj"]}
    layer.load_adapter(1, small)
    clean.load_adapter(1, small)
    assert same(state(layer), state(clean))


def test_base_weights_are_left_as_they_were_and_kept_without_a_copy_if_they_are_not_cut() -> None:
    w13, w2 = base()
    before = w13.clone(), w2.clone()
    for layer in (
        FusedMoELoRA(w13, w2, gate_up=GateUp.HALVES, num_slots=2, rank=4),
        make(place=MoERank(2, 1, 2, 1)),
    ):
        layer.load_adapter(0, stacked())
    assert torch.equal(w13, before[0])
    assert torch.equal(w2, before[1])
    assert (
        FusedMoELoRA(w13, w2, gate_up=GateUp.HALVES, num_slots=1, rank=1).w13.data_ptr()
        == w13.data_ptr()
    )


def one_expert_less() -> ExpertParts:
    parts: dict[str, Factors] = dict(numbered(stacked()))
    for expert in (2, 4):
        del parts[f"experts.{expert}.up_proj"]
    return parts


def other_rank() -> ExpertParts:
    small = numbered(stacked(rank=2))
    return numbered(stacked()) | {"experts.4.up_proj": small["experts.4.up_proj"]}


def twice() -> ExpertParts:
    parts = stacked()
    fused = ExpertFactors(torch.ones(1, 3, HIDDEN), torch.ones(EXPERTS, 2 * INTERMEDIATE, 3), 1.0)
    return parts | {"experts.gate_up_proj": fused}


def too_large() -> ExpertParts:
    part = stacked()["experts.up_proj"]
    return {"experts.up_proj": ExpertFactors(part.a, part.b * float("inf"), 1.0)}


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        (
            one_expert_less,
            "up_proj must have factors for all 6 experts or for none "
            "(missing 2: experts.2.up_proj, experts.4.up_proj)",
        ),
        (
            other_rank,
            "up_proj must have one rank and one scale for all experts (got 3 and 1.5 for "
            "experts.0.up_proj, 2 and 1.5 for experts.4.up_proj)",
        ),
        (twice, "gate_proj of the experts is given twice"),
        (
            lambda: numbered(stacked()) | {"experts.up_proj": stacked()["experts.up_proj"]},
            "up_proj of the experts is given twice",
        ),
        (
            lambda: {"experts.6.up_proj": numbered(stacked())["experts.5.up_proj"]},
            "parts may name experts.PROJECTION or experts.NUMBER.PROJECTION, with one of "
            "gate_proj, up_proj, down_proj (got 'experts.6.up_proj'; "
            "did you mean 'experts.5.up_proj'?)",
        ),
        (
            lambda: {"experts.up_proj": numbered(stacked())["experts.5.up_proj"]},
            "factors of experts.up_proj must have an axis of experts",
        ),
        (
            lambda: {"experts.0.up_proj": stacked()["experts.up_proj"]},
            "factors of experts.0.up_proj must have no axis of experts",
        ),
        (
            lambda: {"experts.down_proj": stacked()["experts.up_proj"]},
            "a of experts.down_proj must be [6 or 1, rank, 12] (got [6, 3, 10])",
        ),
        (
            lambda: stacked(rank=6),
            "rank of gate_proj must be 1 to 5 (got 6)",
        ),
        (too_large, "b of up_proj must have values that are finite in torch.float32"),
    ],
)
def test_a_wrong_adapter_is_refused_and_the_old_one_stays(
    parts: Callable[[], ExpertParts], message: str
) -> None:
    layer = make()
    layer.load_adapter(0, stacked(seed=20))
    before = state(layer)
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        layer.load_adapter(0, parts())
    assert same(state(layer), before)


@pytest.mark.parametrize(
    ("projection", "side"), [("up_proj", "a of up_proj"), ("down_proj", "b of down_proj")]
)
def test_a_layer_with_shared_outer_factors_takes_no_others(projection: str, side: str) -> None:
    layer = make(shared_outer=True)
    name = f"experts.{projection}"
    message = f"{side} must be shared by all experts, as in this layer"
    with pytest.raises(ValueError, match=f"^{message}$"):
        layer.load_adapter(0, {name: stacked()[name]})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"w2": torch.ones(6, 10)}, "w2 must be [experts, hidden, intermediate] (got [6, 10])"),
        (
            {"w13": torch.ones(6, 12, 10)},
            "w13 must be [6, 24, 10], as w2 and the projections gate_proj, up_proj, down_proj say "
            "(got [6, 12, 10])",
        ),
        (
            {"projections": ("up_proj", "up_proj")},
            "projections must be different names of gate, up and down, or of up and down "
            "(got up_proj, up_proj)",
        ),
        (
            {"w13": torch.ones(6, 24, 10).half()},
            "w13 and w2 must have one dtype and one device (got torch.float16 on cpu and "
            "torch.float32 on cpu)",
        ),
        ({"place": MoERank(ep_size=8)}, "experts must be at least ep_size 8 (got 6)"),
    ],
)
def test_a_wrong_layer_is_refused_by_field(change: dict[str, Any], message: str) -> None:
    w13, w2 = base()
    fields: dict[str, Any] = {"w13": w13, "w2": w2, "num_slots": 1, "rank": 2} | change
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        FusedMoELoRA(fields.pop("w13"), fields.pop("w2"), gate_up=GateUp.HALVES, **fields)
