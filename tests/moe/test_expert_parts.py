"""What a MoE layer takes as the parts of an adapter, and what it refuses: each mistake by itself,
before anything is loaded."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor

from lorakernels.common.quantised import Quantised
from lorakernels.dense.weights import LoRAFactors
from lorakernels.layers import moe_weights
from lorakernels.layers.casting import cast_all
from lorakernels.layers.expert_packing import ExpertParts
from lorakernels.layers.gate_up import GateUp
from lorakernels.layers.moe import FusedMoELoRA
from lorakernels.layers.moe_partition import MoERank
from lorakernels.layers.partition import Shard
from lorakernels.moe.weights import ExpertFactors

EXPERTS, HIDDEN, INTER, RANK = 3, 4, 6, 2
WHOLE = MoERank()
ENDS = {"gate_proj": (HIDDEN, INTER), "up_proj": (HIDDEN, INTER), "down_proj": (INTER, HIDDEN)}
UP, GATE_UP, DOWN = "experts.up_proj", "experts.gate_up_proj", "experts.down_proj"


def make(*, experts: int = EXPERTS, shared: bool = False, place: MoERank = WHOLE) -> FusedMoELoRA:
    w13, w2 = torch.ones(experts, 2 * INTER, HIDDEN), torch.ones(experts, HIDDEN, INTER)
    return FusedMoELoRA(
        w13, w2, gate_up=GateUp.HALVES, num_slots=1, rank=RANK, shared_outer=shared, place=place
    )


def stack(a: tuple[int, ...], b: tuple[int, ...], scale: float = 1.0) -> ExpertFactors:
    return ExpertFactors(torch.ones(a), torch.ones(b), scale)


def singles(name: str = "up_proj", **last: tuple[int, ...]) -> dict[str, LoRAFactors]:
    """Factors of each expert; `last` are other shapes of those of the last one."""
    inputs, width = ENDS[name]
    parts = {}
    for expert in range(EXPERTS):
        shapes = {"a": (RANK, inputs), "b": (width, RANK)} | (last if expert == EXPERTS - 1 else {})
        factors = LoRAFactors(torch.ones(shapes["a"]), torch.ones(shapes["b"]), 1.0)
        parts[f"experts.{expert}.{name}"] = factors
    return parts


def without(expert: int) -> dict[str, LoRAFactors]:
    return {n: part for n, part in singles().items() if not n.startswith(f"experts.{expert}.")}


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([torch.ones(1)], "parts must map names to factors (got a list)"),
        (torch.ones(3, 2), "parts must map names to factors (got a Tensor)"),
        ({UP: stack((), (3, 6, 2))}, "a of experts.up_proj must be [3 or 1, rank"),
        ({UP: stack((4,), (3, 6, 2))}, "a of experts.up_proj must be [3 or 1, rank"),
        ({UP: stack((2, 4), (3, 6, 2))}, "a of experts.up_proj must be"),
        ({UP: stack((3, 2, 4, 1), (3, 6, 2))}, "a of experts.up_proj must be"),
        ({UP: stack((3, 2, 5), (3, 6, 2))}, "a of experts.up_proj must be"),
        ({UP: stack((2, 2, 4), (3, 6, 2))}, "a of experts.up_proj must be"),
        ({UP: stack((4, 2, 4), (3, 6, 2))}, "a of experts.up_proj must be"),
        ({UP: stack((0, 2, 4), (3, 6, 2))}, "a of experts.up_proj must be"),
        ({UP: stack((3, 2, 4), (6, 2))}, "b of experts.up_proj must be"),
        ({UP: stack((3, 2, 4), (3, 5, 2))}, "b of experts.up_proj must be"),
        ({UP: stack((3, 2, 4), (3, 6, 1))}, "b of experts.up_proj must be"),
        ({UP: stack((3, 2, 4), (2, 6, 2))}, "b of experts.up_proj must be"),
        ({UP: stack((3, 3, 4), (3, 6, 3))}, "rank of up_proj must be 1 to 2 (got 3"),
        ({UP: stack((3, 0, 4), (3, 6, 0))}, "rank of up_proj must be 1 to 2 (got 0"),
        ({UP: stack((3, 2, 4), (3, 6, 2), float("nan"))}, "scale of up_proj must be finite"),
        ({DOWN: stack((3, 2, 6), (3, 4, 2), 1e-50)}, "scale of down_proj must not vanish"),
        ({GATE_UP: stack((3, 2, 4), (3, 6, 2))}, "b of experts.gate_up_proj must"),
        (singles(a=(RANK, HIDDEN + 1)), "a of experts.2.up_proj must be [rank, 4]"),
        (singles(a=(RANK,)), "a of experts.2.up_proj must be [rank, 4]"),
        (singles(b=(INTER - 1, RANK)), "b of experts.2.up_proj must be [6, 2]"),
        (singles(b=(INTER, RANK + 1)), "b of experts.2.up_proj must be [6, 2]"),
        (singles(a=(1, HIDDEN), b=(INTER, 1)), "up_proj must have one rank and one scale for all"),
        (without(0), "up_proj must have factors for all 3 experts or for none (missing 1: "),
        (without(1), "up_proj must have factors for all 3 experts or for none (missing 1: "),
        (without(2), "up_proj must have factors for all 3 experts or for none (missing 1: "),
        ({"experts.3.up_proj": stack((1, 1, 1), (1, 1, 1))}, "parts may name experts.PROJECTION"),
    ],
)
def test_each_mistake_in_the_parts_of_an_adapter_is_refused_before_it_is_loaded(
    parts: ExpertParts, message: str
) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        make().stage(parts)


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("expert", range(EXPERTS))
def test_each_rank_refuses_factors_that_lack_an_expert_of_any_rank(rank: int, expert: int) -> None:
    # a rank that loaded them would serve another adapter than those that refuse them
    layer = make(place=MoERank(ep_size=3, ep_rank=rank))
    with pytest.raises(ValueError, match=rf"missing 1: experts\.{expert}\.up_proj"):
        layer.load_adapter(0, without(expert))


def test_a_name_covers_its_own_experts_and_slices_and_no_others() -> None:
    parts = {name: set(covered) for name, covered in make().parts.items()}
    for projection in ENDS:
        own = [parts[f"experts.{expert}.{projection}"] for expert in range(EXPERTS)]
        assert [len(one) for one in own] == [1] * EXPERTS
        assert parts[f"experts.{projection}"] == set().union(*own)
    every = [parts[f"experts.{projection}"] for projection in ENDS]
    assert sum(map(len, every)) == len(set().union(*every)) == EXPERTS * len(ENDS)
    assert parts[GATE_UP] == every[0] | every[1]


def test_parts_that_are_none_are_left_out() -> None:
    up = stack((EXPERTS, RANK, HIDDEN), (EXPERTS, INTER, RANK))
    parts: ExpertParts = {"experts.gate_proj": None, UP: up, "experts.1.down_proj": None}
    gate, found, down = make().stage(parts)
    assert gate is None
    assert down is None
    assert found is not None
    assert torch.equal(found.a, up.a)


@pytest.mark.parametrize("name", ["up_proj", "down_proj"])
def test_single_experts_share_no_outer_factor_unless_there_is_only_one(name: str) -> None:
    side = "b" if name == "down_proj" else "a"
    message = f"{side} of {name} must be shared by all experts, as in this layer"
    with pytest.raises(ValueError, match=f"^{message}$"):
        make(shared=True).stage(singles(name))
    only = {f"experts.0.{name}": singles(name)[f"experts.0.{name}"]}
    staged = make(experts=1, shared=True).stage(only)
    assert sum(factors is not None for factors in staged) == 1


def test_factors_are_cast_to_the_device_of_the_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    # whether values are finite cannot be read from a tensor without data
    monkeypatch.setattr(Tensor, "tolist", lambda tensor: [True] * tensor.numel())
    like = torch.empty(1, dtype=torch.float16, device="meta")
    cast = cast_all({"a": torch.ones(2), "b": torch.ones(3)}, like)
    assert [(t.device.type, t.dtype) for t in cast.values()] == [("meta", torch.float16)] * 2


def test_no_weight_of_8_bits_is_padded_as_a_floating_point_tensor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # torch 2.11 has no kernel for that
    seen: list[torch.dtype] = []

    def take(tensor: Tensor, shard: Shard, *, dim: int) -> Tensor:
        seen.append(tensor.dtype)
        return taken(tensor, shard, dim=dim)

    taken = moe_weights.take
    monkeypatch.setattr(moe_weights, "take", take)
    shapes = ((EXPERTS, 2 * INTER, HIDDEN), (EXPERTS, HIDDEN, INTER))
    place = MoERank(tp_size=2, tp_rank=1)
    dtype = torch.float8_e4m3fn
    layer = FusedMoELoRA(
        *(Quantised(torch.ones(s).to(dtype), torch.ones(s[:2])) for s in shapes),
        gate_up=GateUp.HALVES,
        num_slots=1,
        rank=1,
        dtype=torch.float32,
        place=place,
        padded_intermediate=8,
    )
    # both halves of w13 and w2, and scales of w13, which have more than 8 bits
    assert seen.count(torch.uint8) == 3
    assert set(seen) == {torch.uint8, torch.float32}
    assert layer.w2.dtype == dtype
