"""MoE adapters that come and go between the steps of a layer, against merged weights in fp64."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from lorakernels.adapters.adapter import Adapter
from lorakernels.adapters.slots import AdapterSlots
from lorakernels.batch.metadata import BatchMetadata
from lorakernels.dense.weights import LoRAFactors
from lorakernels.layers.gate_up import GateUp
from lorakernels.layers.moe import FusedMoELoRA, MoEScratch
from lorakernels.moe.align.metadata import PairMetadata
from lorakernels.moe.weights import ExpertFactors

EXPERTS, HIDDEN, INTER, RANK, SLOTS, ROWS, TOP_K = 3, 12, 10, 4, 2, 6, 2
PROJECTIONS = {
    "gate_proj": (HIDDEN, INTER),
    "up_proj": (HIDDEN, INTER),
    "down_proj": (INTER, HIDDEN),
}
LAYER = "layers.0.mlp.experts"
# of two choices of a token, each expert is the first one of some token
CHOICES = torch.tensor([[0, 1], [1, 2], [2, 0]] * 2, dtype=torch.int32)


def randn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def w13() -> Tensor:
    return randn(EXPERTS, 2 * INTER, HIDDEN, seed=1) / HIDDEN**0.5


def w2() -> Tensor:
    return randn(EXPERTS, HIDDEN, INTER, seed=2) / INTER**0.5


def parts(seed: int) -> dict[str, ExpertFactors]:
    """Factors differ in each expert, ranks and scales in each projection."""
    found = {}
    for i, (name, (inputs, width)) in enumerate(PROJECTIONS.items()):
        rank = 1 + (seed + i) % RANK
        a = randn(EXPERTS, rank, inputs, seed=100 * seed + i) / inputs**0.5
        b = randn(EXPERTS, width, rank, seed=100 * seed + 10 + i) / rank**0.5
        found[name] = ExpertFactors(a, b, 0.5 + 0.25 * seed + 0.5 * i)
    return found


def adapter(name: str, seed: int) -> Adapter:
    return Adapter(name, {f"{LAYER}.{p}": f for p, f in parts(seed).items()})


def merged(x: Tensor, router: Tensor, given: Mapping[str, ExpertFactors]) -> Tensor:
    """One token of the layer with the deltas added to its weights."""

    def delta(name: str) -> Tensor:
        one = given.get(name)
        inputs, width = PROJECTIONS[name]
        if one is None:
            return torch.zeros(EXPERTS, width, inputs, dtype=torch.float64)
        return one.scale * one.b.double() @ one.a.double()

    first = w13().double() + torch.cat([delta("gate_proj"), delta("up_proj")], dim=1)
    second = w2().double() + delta("down_proj")
    gate, up = (first @ x.double()).chunk(2, dim=1)
    results = torch.einsum("eoi,ei->eo", second, F.silu(gate) * up)
    return torch.einsum("e,eo->o", router.double(), results)


@dataclass
class Server:
    """One layer; metadata and scratch live as long as a server does."""

    layer: FusedMoELoRA = field(
        default_factory=lambda: FusedMoELoRA(
            w13(), w2(), gate_up=GateUp.HALVES, num_slots=SLOTS, rank=RANK
        )
    )

    def __post_init__(self) -> None:
        self.slots = AdapterSlots({LAYER: self.layer})
        self.batch = BatchMetadata(max_tokens=ROWS, max_slots=SLOTS, device="cpu")
        self.pairs = PairMetadata(
            max_tokens=ROWS,
            top_k=TOP_K,
            num_experts=EXPERTS,
            max_slots=SLOTS,
            device="cpu",
            with_base=True,
        )
        self.scratch = MoEScratch([self.layer], max_tokens=ROWS, top_k=TOP_K)

    def serve(self, x: Tensor, *names: str | None) -> Tensor:
        """Token i uses the adapter names[i]."""
        rows = [-1 if name is None else self.slots.slot_of(name) for name in names]
        self.batch.prepare(torch.tensor(rows, dtype=torch.int32))
        ids, router = routing(len(rows))
        return self.layer(x, ids, router, self.batch, self.pairs, self.scratch)


def routing(tokens: int) -> tuple[Tensor, Tensor]:
    return CHOICES[:tokens], randn(ROWS, TOP_K, seed=3).abs()[:tokens] + 0.1


def assert_served(server: Server, *seeds: int | None) -> None:
    """One token for each of the adapters, which are named after their seeds; None is a base row."""
    x = randn(len(seeds), HIDDEN, seed=7)
    out = server.serve(x, *(seed and f"a{seed}" for seed in seeds))
    ids, router = routing(len(seeds))
    for token, seed in enumerate(seeds):
        weights = torch.zeros(EXPERTS).scatter(0, ids[token].long(), router[token])
        wanted = merged(x[token], weights, parts(seed) if seed else {})
        torch.testing.assert_close(out[token].double(), wanted, rtol=1e-4, atol=1e-4)


def test_experts_that_come_back_into_another_slot_are_served_from_there() -> None:
    server = Server()
    assert server.slots.activate(adapter("a1", 1)) == 0
    for _ in range(2):
        assert_served(server, 1, None, 1)
    server.slots.evict("a1")
    assert server.slots.activate(adapter("a2", 2)) == 0
    assert_served(server, 2, None, 2)
    assert server.slots.activate(adapter("a1", 1)) == 1
    assert_served(server, 1, None, 2, 2, 1)


def test_slot_0_serves_its_new_experts_and_nothing_of_the_evicted_ones() -> None:
    server, fresh = Server(), Server()
    server.slots.activate(adapter("a1", 1))
    server.slots.activate(adapter("a2", 2))
    assert_served(server, 1, 2, None)
    server.slots.evict("a1")
    # the successor has no factors for the down projection
    up_only = {p: f for p, f in adapter("a3", 3).modules.items() if "down" not in p}
    for one in (server, fresh):
        assert one.slots.activate(Adapter("a3", up_only)) == 0
    x = randn(3, HIDDEN, seed=8)
    assert torch.equal(server.serve(x, "a3", None, "a3"), fresh.serve(x, "a3", None, "a3"))


def test_every_slot_projection_and_expert_has_a_rank_a_scale_and_factors_of_its_own() -> None:
    server = Server()
    for slot, seed in enumerate((1, 2)):
        assert server.slots.activate(adapter(f"a{seed}", seed)) == slot
        own = list(parts(seed).values())
        held = (server.layer.w13_slots, server.layer.w2_slots)
        ranks = [rank for slots in held for rank in slots.ranks[slot].tolist()]
        scales = [scale for slots in held for scale in slots.scales[slot].tolist()]
        assert ranks == [part.rank for part in own]
        assert scales == [part.scale for part in own]
    assert_served(server, 2, 1, None, 1, 2, 1)


def test_tokens_of_three_dimensions_are_served_one_by_one() -> None:
    server = Server()
    for seed in (1, 2):
        server.slots.activate(adapter(f"a{seed}", seed))
    x = randn(2, 3, HIDDEN, seed=5)
    names = ("a1", None, "a2", "a2", "a1", None)
    out = server.serve(x, *names)
    assert out.shape == x.shape
    assert torch.equal(out.flatten(0, 1), server.serve(x.flatten(0, 1), *names))
    assert not torch.equal(out[0], out[1])


@pytest.mark.parametrize("odd", range(EXPERTS))
def test_an_adapter_whose_experts_differ_in_scale_alone_is_refused(odd: int) -> None:
    # a slot has one scale for all experts of a projection
    up = parts(1)["up_proj"]
    singles = {
        f"experts.{e}.up_proj": LoRAFactors(up.a[e], up.b[e], up.scale + (e == odd))
        for e in range(EXPERTS)
    }
    layer = Server().layer
    layer.load_adapter(0, {"experts.up_proj": up})
    before = [t.clone() for t in (layer.w13_slots.a, layer.w13_slots.b, layer.w13_slots.scales)]
    message = "up_proj must have one rank and one scale for all experts (got "
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        layer.load_adapter(0, singles)
    after = (layer.w13_slots.a, layer.w13_slots.b, layer.w13_slots.scales)
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
