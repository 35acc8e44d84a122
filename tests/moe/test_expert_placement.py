"""Experts anywhere: each token-expert pair is computed once, with the weights and the adapters of
its expert, wherever the experts are and however often."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lorakernels.batch.metadata import BatchMetadata
from lorakernels.dense.weights import LoRAFactors
from lorakernels.layers.expert_placement import ExpertPlacement
from lorakernels.layers.expert_routing import ExpertRouting
from lorakernels.layers.gate_up import GateUp
from lorakernels.layers.moe import FusedMoELoRA, MoEScratch
from lorakernels.layers.moe_partition import MoERank, cut_moe
from lorakernels.moe.align.metadata import PairMetadata
from lorakernels.moe.weights import ExpertFactors

EXPERTS, HIDDEN, INTERMEDIATE, TOP_K, ROWS, RANK = 5, 12, 8, 2, 7, 2
SLOTS = (0, 0, -1, 0, 0, -1, 0)
CPU = torch.device("cpu")
# one expert in one place, others in two or three, of which two are on one rank
REPLICATED = ExpertPlacement(EXPERTS, ((4, 0, 2), (2, 1), (3, 4, 4, 1)))


@st.composite
def placements(draw: st.DrawFn) -> ExpertPlacement:
    """Any placement of up to six experts on up to four ranks."""
    count, ranks = draw(st.integers(1, 6)), draw(st.integers(1, 4))
    more = draw(st.lists(st.integers(0, count - 1), max_size=8))
    places = draw(st.permutations([*range(count), *more, *[0] * ranks]))
    cuts = sorted(draw(st.permutations(range(1, len(places))))[: ranks - 1])
    ends = [0, *cuts, len(places)]
    parts = (tuple(places[a:b]) for a, b in pairwise(ends))
    return ExpertPlacement(count, tuple(parts))


def local_ids(placement: ExpertPlacement, ids: Tensor) -> list[Tensor]:
    """What each rank makes of the ids of a step."""
    found = []
    for rank in range(len(placement.of_rank)):
        routing = ExpertRouting(placement, rank, CPU, names_places=False)
        mapped, table = routing.ids_and_map(ids)
        if table is not None:
            known = (mapped >= 0) & (mapped < len(table))
            mapped = torch.where(known, table[mapped.clamp(0, len(table) - 1)], -1)
        found.append(mapped)
    return found


@settings(max_examples=80)
@given(placement=placements(), seed=st.integers(0, 1 << 20))
def test_one_rank_computes_a_pair_with_its_expert(placement: ExpertPlacement, seed: int) -> None:
    count = placement.num_experts
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(-2, count + 2, (9, 3), generator=generator, dtype=torch.int32)
    found = local_ids(placement, ids)
    for place in ((t, c) for t in range(9) for c in range(3)):
        expert, locals_ = int(ids[place]), [int(local[place]) for local in found]
        if len(placement.places) == count == len(placement.of_rank[0]):
            # one rank whose ids are local: the alignment drops those of no expert
            locals_ = [local if 0 <= local < count else -1 for local in locals_]
        owners = [(rank, local) for rank, local in enumerate(locals_) if local >= 0]
        if 0 <= expert < count:
            ((rank, local),) = owners
            assert placement.of_rank[rank][local] == expert
        else:
            assert not owners


def test_rows_take_all_replicas_in_turn() -> None:
    ids = torch.full((6, 1), 4, dtype=torch.int32)
    ranks = torch.stack(local_ids(REPLICATED, ids))[..., 0]
    assert ranks.tolist() == [
        [0, -1, -1, 0, -1, -1],
        [-1, -1, -1, -1, -1, -1],
        [-1, 1, 2, -1, 1, 2],
    ]


@pytest.mark.parametrize(("experts", "ranks"), [(5, 2), (8, 4), (3, 3), (7, 1)])
def test_runs_and_turns_hold_each_expert_once_and_differ_by_one_at_most(
    experts: int, ranks: int
) -> None:
    for make in (ExpertPlacement.in_runs, ExpertPlacement.round_robin):
        placement = make(experts, ranks)
        assert sorted(placement.places) == list(range(experts))
        assert not placement.has_replicas
        sizes = [len(held) for held in placement.of_rank]
        assert max(sizes) - min(sizes) <= 1
    assert ExpertPlacement.round_robin(5, 2).of_rank == ((0, 2, 4), (1, 3))
    assert ExpertPlacement.in_runs(5, 2).of_rank == ((0, 1, 2), (3, 4))


def test_places_of_a_load_balancer_are_dealt_out_in_equal_runs() -> None:
    placement = ExpertPlacement.of_places([2, 0, 1, 2, 0, 0], 3, num_experts=3)
    assert placement.of_rank == ((2, 0), (1, 2), (0, 0))
    assert placement.place_map(1) == [-1, -1, 0, 1, -1, -1]
    assert placement.replicas(2) == [[-1, 0, 1], [-1], [-1, -1]]


def test_places_of_a_load_balancer_may_be_a_tensor() -> None:
    places: Any = torch.tensor([2, 0, 1, 2])
    found = ExpertPlacement.of_places(places, 2, num_experts=3)
    assert found == ExpertPlacement.of_places([2, 0, 1, 2], 2, num_experts=3)


def randn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def layer(placement: ExpertPlacement | None, place: MoERank, **options: Any) -> FusedMoELoRA:
    found = FusedMoELoRA(
        randn(EXPERTS, 2 * INTERMEDIATE, HIDDEN, seed=1),
        randn(EXPERTS, HIDDEN, INTERMEDIATE, seed=2),
        gate_up=GateUp.HALVES,
        w13_bias=randn(EXPERTS, 2 * INTERMEDIATE, seed=3),
        w2_bias=randn(EXPERTS, HIDDEN, seed=4),
        num_slots=1,
        rank=RANK,
        place=place,
        placement=placement,
        **options,
    )
    found.load_adapter(0, adapter(numbered=False))
    return found


def adapter(*, numbered: bool) -> dict[str, Any]:
    a, b = randn(EXPERTS, RANK, HIDDEN, seed=5), randn(EXPERTS, INTERMEDIATE, RANK, seed=6)
    down = ExpertFactors(
        randn(EXPERTS, RANK, INTERMEDIATE, seed=7), randn(EXPERTS, HIDDEN, RANK, seed=8), 0.5
    )
    if not numbered:
        return {"experts.up_proj": ExpertFactors(a, b, 2.0), "experts.down_proj": down}
    up = {f"experts.{e}.up_proj": LoRAFactors(a[e], b[e], 2.0) for e in range(EXPERTS)}
    return up | {"experts.down_proj": down}


def run(found: FusedMoELoRA, ids: Tensor) -> Tensor:
    sizes = {"max_tokens": ROWS, "max_slots": 1, "device": "cpu"}
    batch = BatchMetadata(**sizes)  # type: ignore[arg-type]
    batch.prepare(torch.tensor(SLOTS, dtype=torch.int32))
    count = found.cut.experts.size
    pairs = PairMetadata(top_k=TOP_K, num_experts=count, with_base=True, **sizes)  # type: ignore[arg-type]
    scratch = MoEScratch([found], max_tokens=ROWS, top_k=TOP_K)
    weights = randn(ROWS, TOP_K, seed=9).abs()
    out: Tensor = found(randn(ROWS, HIDDEN, seed=10), ids, weights, batch, pairs, scratch)
    return out


def chosen() -> Tensor:
    scores = randn(ROWS, EXPERTS, seed=11)
    return torch.topk(scores, TOP_K).indices.int()


PLACEMENTS = {
    "turns": ExpertPlacement.round_robin(EXPERTS, 3),
    "replicas": REPLICATED,
    "one rank, another order": ExpertPlacement(EXPERTS, ((4, 2, 0, 1, 3),)),
    # each rank begins and ends as a run of its experts would
    "inner experts in another order": ExpertPlacement(EXPERTS, ((0, 2, 1, 3), (4,))),
    "one rank, inner experts in another order": ExpertPlacement(EXPERTS, ((0, 3, 2, 1, 4),)),
    "one rank with replicas": ExpertPlacement(EXPERTS, ((0, 1, 2, 3, 4, 1, 1),)),
}


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("name", PLACEMENTS)
def test_the_ranks_of_any_placement_add_up_to_the_whole_layer(name: str, tp: int) -> None:
    placement, ids = PLACEMENTS[name], chosen()
    ep = len(placement.of_rank)
    total = torch.zeros(ROWS, HIDDEN)
    for ep_rank in range(ep):
        for tp_rank in range(tp):
            total += run(layer(placement, MoERank(ep, ep_rank, tp, tp_rank)), ids)
    torch.testing.assert_close(total, run(layer(None, MoERank()), ids), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", PLACEMENTS)
def test_a_server_may_choose_the_replicas_itself(name: str) -> None:
    placement, ids = PLACEMENTS[name], chosen()
    ep = len(placement.of_rank)
    # the last place of each expert, where the layer would take another one for most rows
    last = {expert: place for place, expert in enumerate(placement.places)}
    places = torch.tensor([[last[e] for e in row] for row in ids.tolist()], dtype=torch.int32)
    total = torch.zeros(ROWS, HIDDEN)
    for rank in range(ep):
        total += run(layer(placement, MoERank(ep, rank), ids_name_places=True), places)
    torch.testing.assert_close(total, run(layer(None, MoERank()), ids), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("numbered", [False, True])
def test_each_place_has_the_weights_biases_and_factors_of_its_expert(numbered: bool) -> None:
    whole = layer(None, MoERank())
    for rank, experts in enumerate(REPLICATED.of_rank):
        part = layer(REPLICATED, MoERank(3, rank))
        part.load_adapter(0, adapter(numbered=numbered))
        ids = list(experts)
        assert torch.equal(part.w13, whole.w13[ids])
        assert torch.equal(part.w2, whole.w2[ids])
        assert part.w13_bias is not None
        assert whole.w13_bias is not None
        assert torch.equal(part.w13_bias, whole.w13_bias[ids])
        for have, want in ((part.w13_slots, whole.w13_slots), (part.w2_slots, whole.w2_slots)):
            assert torch.equal(have.a[0], want.a[0][ids])
            assert torch.equal(have.b[0], want.b[0][ids])


def test_ids_of_another_dtype_are_refused_with_replicas_as_without() -> None:
    for placement in (REPLICATED, ExpertPlacement.round_robin(EXPERTS, 3)):
        found = layer(placement, MoERank(3, 0))
        others = (torch.int64, torch.uint8, torch.float32)
        shapes = chosen()[0], chosen().expand(2, *chosen().shape)
        for ids in (*map(chosen().to, others), *shapes):
            with pytest.raises(ValueError, match="topk_ids must be int32 with 2 dimensions"):
                run(found, ids)


@pytest.mark.parametrize("placement", [REPLICATED, ExpertPlacement.round_robin(EXPERTS, 3)])
def test_ids_of_another_device_are_refused_with_replicas_as_without(
    placement: ExpertPlacement,
) -> None:
    with pytest.raises(ValueError, match=r"topk_ids must be on cpu \(got meta\)"):
        run(layer(placement, MoERank(3, 0)), chosen().to("meta"))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ExpertPlacement(2, ((0, 1), ())), "rank 1 must hold at least one expert"),
        (lambda: ExpertPlacement(2, ((0, 2),)), "experts of ranks must be 0 to 1 (got 2)"),
        (lambda: ExpertPlacement(2, ((0, -1),)), "experts of ranks must be 0 to 1 (got -1)"),
        (lambda: ExpertPlacement(2, ((0, 1, 7),)), "experts of ranks must be 0 to 1 (got 7)"),
        (
            lambda: ExpertPlacement(3, ((0,), (2, 0))),
            "each of the 3 experts must be on a rank (missing 1)",
        ),
        (
            lambda: ExpertPlacement.of_places([0, 1, 2, 0], 2, num_experts=4),
            "each of the 4 experts must be on a rank (missing 3)",
        ),
        (
            lambda: ExpertPlacement.of_places([2, 1, 2, 1], 2, num_experts=3),
            "each of the 3 experts must be on a rank (missing 0)",
        ),
        (
            lambda: ExpertPlacement.of_places([0, 1, 2], 2, num_experts=3),
            "ep_size must divide 3 places (got 2)",
        ),
        (
            lambda: ExpertPlacement.of_places([0, 1, 2], 0, num_experts=3),
            "ep_size must divide 3 places (got 0)",
        ),
        (
            lambda: ExpertPlacement.round_robin(2, 3),
            "experts must be at least ep_size 3 (got 2)",
        ),
        (lambda: ExpertPlacement.in_runs(2, 0), "ep_size must be at least 1 (got 0)"),
        (
            lambda: cut_moe(4, 8, MoERank(2, 0), placement=ExpertPlacement.in_runs(5, 2)),
            "placement must be of 4 experts on 2 ranks (got 5 on 2)",
        ),
        (
            lambda: cut_moe(4, 8, MoERank(2, 0), placement=ExpertPlacement.in_runs(4, 1)),
            "placement must be of 4 experts on 2 ranks (got 4 on 1)",
        ),
    ],
)
def test_a_wrong_placement_is_refused(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        make()
