"""MoE layers whose adapters are sharded by rank, against layers that are not cut at all. The ranks
that share experts exchange what the shrinks leave; all of them run in this process."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

import pytest
import torch
from torch import Tensor

from loragate.core.machine import select_interpreter

select_interpreter()

from lorakernels.batch.metadata import BatchMetadata  # noqa: E402
from lorakernels.common.quantised import Quantised, quantise_rows  # noqa: E402
from lorakernels.dense import sharded  # noqa: E402
from lorakernels.layers import moe  # noqa: E402
from lorakernels.layers.gate_up import GateUp  # noqa: E402
from lorakernels.layers.moe import FusedMoELoRA, MoEScratch  # noqa: E402
from lorakernels.layers.moe_partition import MoERank, cut_expert_ranks  # noqa: E402
from lorakernels.layers.partition import LoRASharding, Shard  # noqa: E402
from lorakernels.moe.align.metadata import PairMetadata  # noqa: E402
from lorakernels.moe.delta.ops import MoEWorkspace, moe_delta  # noqa: E402
from lorakernels.moe.layer import ops  # noqa: E402
from lorakernels.moe.layer.forms import MoEForm  # noqa: E402
from lorakernels.moe.layer.types import RouterWeight  # noqa: E402
from lorakernels.moe.rank_shards import RankShardedExperts  # noqa: E402
from lorakernels.moe.weights import ExpertFactors  # noqa: E402
from lorakernels.runtime import collectives  # noqa: E402
from lorakernels.runtime.collectives import SimulatedRanks  # noqa: E402
from lorakernels.runtime.options import DUAL_STREAM  # noqa: E402

HIDDEN, INTER, EXPERTS, TOP_K, SLOTS, RANK, MOST = 19, 12, 4, 2, 4, 6, 16
# slot 3 is empty
ROWS = torch.tensor([2, -1, 0, 0, 1, 3, -1, 2, 0, 2], dtype=torch.int32)
# of gate, up and down in slots 0 to 2: those of the buffers, one, fewer than a rank holds
RANKS = ((6, 2, 5), (1, 6, 0), (3, 4, 1))


# one rank of two, which holds half of the ranks of A
SIZES: dict[str, Any] = {
    "num_slots": SLOTS,
    "num_experts": EXPERTS,
    "slice_widths": (4, 4),
    "base_widths": (4, 4),
    "in_features": HIDDEN,
    "rank": RANK,
    "held": range(3),
    "first_column": 0,
    "dtype": torch.float32,
    "device": "cpu",
}


@pytest.mark.parametrize(("held", "copies"), [(range(6), 0), (range(3, 6), 4), (range(2, 3), 12)])
def test_memory_of_an_exchange_is_planned_where_a_rank_holds_a_part_of_the_ranks_of_a(
    held: range, copies: int
) -> None:
    assert RankShardedExperts(**SIZES | {"held": held}).exchanged_copies == copies


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"num_slots": 0}, r"num_slots must be at least 1 \(got 0\)"),
        ({"in_features": 0}, r"in_features must be at least 1 \(got 0\)"),
        ({"slice_widths": ()}, r"slice_widths must name at least one slice \(got none\)"),
        ({"slice_widths": (4, 0)}, r"slice_widths must be at least 1 \(got 0\)"),
        ({"rank": 9999, "held": range(9999)}, r"rank must be 1 to \d+ \(got 9999\)"),
        ({"dtype": torch.int8}, r"dtype must be float16, bfloat16 or float32 \(got torch.int8\)"),
    ],
)
def test_slots_of_wrong_sizes_are_refused(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RankShardedExperts(**SIZES | changed)


def randn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) / 2


def adapter(slot: int, *, shared_outer: bool = False) -> dict[str, ExpertFactors]:
    shapes = {
        "gate_proj": (HIDDEN, INTER),
        "up_proj": (HIDDEN, INTER),
        "down_proj": (INTER, HIDDEN),
    }
    made = {}
    for part, (rank, (name, (k, n))) in enumerate(zip(RANKS[slot], shapes.items(), strict=True)):
        of_a, of_b = EXPERTS, EXPERTS
        if shared_outer:
            of_a, of_b = (EXPERTS, 1) if name == "down_proj" else (1, EXPERTS)
        seed = 100 * slot + 10 * part
        a, b = randn(of_a, rank, k, seed=seed), randn(of_b, n, rank, seed=seed + 1)
        if rank:
            made[f"experts.{name}"] = ExpertFactors(a, b, 0.5 + part)
    return made


@dataclass(frozen=True)
class Group:
    """A layer over several ranks, and the same layer whole."""

    ranks: list[FusedMoELoRA]
    whole: FusedMoELoRA
    # of each part of the experts, the ranks that share it
    simulated: list[SimulatedRanks]

    @classmethod
    def of(
        cls, tp: int, ep: int = 1, *, dtype: torch.dtype = torch.float32, **options: Any
    ) -> Group:
        w13, w2 = randn(EXPERTS, 2 * INTER, HIDDEN, seed=1), randn(EXPERTS, HIDDEN, INTER, seed=2)
        weights = w13.to(dtype), w2.to(dtype)
        common: dict[str, Any] = {"num_slots": SLOTS, "rank": RANK, "gate_up": GateUp.HALVES}
        common |= options
        simulated = [SimulatedRanks(tp) for _ in range(ep)]
        ranks = [
            FusedMoELoRA(
                *weights,
                **common,
                place=MoERank(ep, part, tp, rank),
                sharding=LoRASharding.RANK,
                collective=simulated[part].rank(rank),
            )
            for part in range(ep)
            for rank in range(tp)
        ]
        common.pop("padded_intermediate", None)
        group = cls(ranks, FusedMoELoRA(*weights, **common), simulated)
        for slot in range(3):
            for layer in (*ranks, group.whole):
                own = adapter(slot, shared_outer=bool(options.get("shared_outer")))
                layer.load_adapter(slot, own)
        return group

    def parts(self, x: Tensor, ids: Tensor, weights: Tensor, rows: Tensor = ROWS) -> list[Tensor]:
        """What each rank returns."""
        calls = [step_of(layer, x, ids, weights, rows) for layer in self.ranks]
        tp = self.simulated[0].size
        return [
            part
            for number, simulated in enumerate(self.simulated)
            for part in simulated.run(calls[number * tp : (number + 1) * tp])
        ]

    def check(self, x: Tensor, limit: float = 1e-4) -> None:
        ids, weights = routes(len(x))
        want = step_of(self.whole, x, ids, weights, ROWS)()
        found = torch.stack(self.parts(x, ids, weights)).sum(0)
        torch.testing.assert_close(found, want, rtol=1e-2 * limit, atol=limit)


def routes(tokens: int) -> tuple[Tensor, Tensor]:
    ids = randn(tokens, EXPERTS, seed=7).argsort(1)[:, :TOP_K].int().contiguous()
    # a token without an expert, and one with a single one
    ids[1], ids[2, 1] = -1, -1
    return ids, randn(tokens, TOP_K, seed=8).abs()


def prepared(layer: FusedMoELoRA, rows: Tensor) -> tuple[BatchMetadata, PairMetadata]:
    batch = BatchMetadata(max_tokens=MOST, max_slots=SLOTS, device="cpu")
    batch.prepare(rows)
    pairs = PairMetadata(
        max_tokens=MOST,
        top_k=TOP_K,
        num_experts=layer.cut.experts.size,
        max_slots=SLOTS,
        device="cpu",
        with_base=True,
    )
    return batch, pairs


def step_of(
    layer: FusedMoELoRA, x: Tensor, ids: Tensor, weights: Tensor, rows: Tensor, **options: Any
) -> Callable[[], Tensor]:
    """As in a process of its own: no rank finds what another one has left."""
    batch, pairs = prepared(layer, rows)
    scratch = MoEScratch([layer], max_tokens=MOST, top_k=TOP_K)
    for memory in scratch.tensors:
        memory.fill_(math.nan)
    return lambda: layer(x, ids, weights, batch, pairs, scratch, **options)


def test_a_rank_may_have_a_single_column_of_down() -> None:
    columns = [
        cut_expert_ranks(8, 4, MoERank(tp_size=4, tp_rank=rank)).columns for rank in range(4)
    ]
    assert columns == [Shard(rank, rank + 1, 1) for rank in range(4)]


@pytest.mark.parametrize(("tp", "ep"), [(1, 1), (2, 1), (3, 1), (4, 1), (2, 2)])
def test_the_ranks_together_are_the_layer_that_is_not_cut(tp: int, ep: int) -> None:
    Group.of(tp, ep).check(randn(10, HIDDEN, seed=3))


@pytest.mark.parametrize(
    "options",
    [
        {"shared_outer": True},
        {"router_weight": RouterWeight.ON_INPUT},
        {"padded_intermediate": 16},
        {"rank": 65},
        {
            "w13_bias": randn(EXPERTS, 2 * INTER, seed=4),
            "w2_bias": randn(EXPERTS, HIDDEN, seed=5),
        },
    ],
    ids=["shared outer", "router on input", "padded", "large rank", "biases"],
)
def test_layers_of_every_kind_are_sharded(options: dict[str, Any]) -> None:
    Group.of(2, **options).check(randn(10, HIDDEN, seed=3))


def test_layers_of_16_bits_differ_by_roundings_alone() -> None:
    group = Group.of(3, dtype=torch.bfloat16)
    x = randn(10, HIDDEN, seed=3).bfloat16()
    group.check(x, limit=0.15)


def test_what_ranks_of_layers_of_16_bits_exchange_is_fp32() -> None:
    group = Group.of(2, dtype=torch.bfloat16)
    exchanged = []
    answer = group.simulated[0].answer

    def noting(number: int) -> Any:
        parts = answer(number)
        exchanged.extend(parts or ())
        return parts

    group.simulated[0].answer = noting  # type: ignore[method-assign]
    group.parts(randn(10, HIDDEN, seed=3).bfloat16(), *routes(10))
    assert exchanged
    assert {part.tensor.dtype for part in exchanged} == {torch.float32}


def test_base_products_of_8_bits_are_those_of_ranks_that_hold_whole_adapters() -> None:
    # a rank quantises its part of the activations of down by itself, so that a layer that is not
    # cut is no reference
    weights = [
        Quantised(rows.values.view(w.shape), rows.scales.view(w.shape[:2]))
        for w in (randn(EXPERTS, 2 * INTER, HIDDEN, seed=1), randn(EXPERTS, HIDDEN, INTER, seed=2))
        for rows in [quantise_rows(w.flatten(0, 1))]
    ]
    x, (ids, router) = randn(10, HIDDEN, seed=3), routes(10)
    totals, tp = {}, 2
    for sharding in LoRASharding:
        simulated = SimulatedRanks(tp)
        calls = []
        for rank in range(tp):
            layer = FusedMoELoRA(
                *weights,
                num_slots=SLOTS,
                rank=RANK,
                gate_up=GateUp.HALVES,
                dtype=torch.float32,
                place=MoERank(1, 0, tp, rank),
                sharding=sharding,
                collective=simulated.rank(rank) if sharding is LoRASharding.RANK else None,
            )
            for slot in range(3):
                layer.load_adapter(slot, adapter(slot))
            calls.append(step_of(layer, x, ids, router, ROWS, quantised_x=quantise_rows(x)))
        totals[sharding] = torch.stack(simulated.run(calls)).sum(0)
    # a value may be rounded to its neighbour of 8 bits where sums are added in another order
    torch.testing.assert_close(
        totals[LoRASharding.RANK], totals[LoRASharding.BASE], rtol=0, atol=0.05
    )


def test_each_rank_holds_its_part_of_both_factors() -> None:
    # a rank of 6 is rounded up to four parts of two
    layers = Group.of(4).ranks
    w13, w2 = layers[1].w13_slots, layers[1].w2_slots
    assert (w13.a.shape, w13.b.shape) == ((SLOTS, EXPERTS, 2, 2, HIDDEN), (SLOTS, EXPERTS, 6, 8))
    assert w2.a.shape == (SLOTS, EXPERTS, 1, 8, 3)
    assert [layer.w2_slots.b.shape[2] for layer in layers] == [4, 5, 5, 5]
    assert [layer.w2_slots.first_column for layer in layers] == [0, 4, 9, 14]
    assert {layer.w13_slots.first_column for layer in layers} == {0}
    # the adapter of slot 1 has one rank of gate, which is on the first rank
    assert [bool(layer.w13_slots.a[1, :, 0].any()) for layer in layers] == [True] + 3 * [False]


def test_factors_that_all_experts_share_are_held_once() -> None:
    layer = Group.of(2, shared_outer=True).ranks[0]
    assert (layer.w13_slots.a.shape[1], layer.w13_slots.b.shape[1]) == (1, EXPERTS)
    assert (layer.w2_slots.a.shape[1], layer.w2_slots.b.shape[1]) == (EXPERTS, 1)


def test_an_adapter_that_is_smaller_than_the_one_before_it_is_alone_in_its_slot() -> None:
    group = Group.of(2)
    for layer in (*group.ranks, group.whole):
        layer.load_adapter(0, adapter(1))
        layer.unload(2)
    group.check(randn(10, HIDDEN, seed=3))


@pytest.mark.parametrize("shape", [(2, 6), (4, 40)])
def test_the_workspace_holds_the_exchange_of_the_largest_batch(shape: tuple[int, int]) -> None:
    tp, rank = shape
    group, x = Group.of(tp, rank=rank), randn(MOST, HIDDEN, seed=3)
    rows = torch.arange(MOST).int() % SLOTS
    ids, weights = routes(MOST)
    found = torch.stack(group.parts(x, ids, weights, rows)).sum(0)
    want = step_of(group.whole, x, ids, weights, rows)()
    torch.testing.assert_close(found, want, rtol=1e-6, atol=1e-4)


def test_a_workspace_that_is_made_in_inference_mode_serves_an_exchange_outside_of_it() -> None:
    group, x = Group.of(2), randn(10, HIDDEN, seed=3)
    ids, weights = routes(10)
    with torch.inference_mode():
        scratch = MoEScratch(group.ranks, max_tokens=MOST, top_k=TOP_K)
    found = group.simulated[0].run(
        [
            lambda layer=layer: layer(x, ids, weights, *prepared(layer, ROWS), scratch)
            for layer in group.ranks
        ]
    )
    assert all(map(torch.equal, found, group.parts(x, ids, weights)))


def test_a_workspace_without_room_for_an_exchange_is_refused_by_both_sizes() -> None:
    layer, x = Group.of(2).ranks[0], randn(MOST, HIDDEN, seed=3)
    ids, weights = routes(MOST)
    small = MoEScratch([layer], max_tokens=MOST, top_k=TOP_K)
    # as one of a layer that is not sharded would be
    small.workspace.shrunk = small.workspace.shrunk[: len(small.workspace.shrunk) // 5]
    batch, pairs = prepared(layer, torch.arange(MOST).int() % SLOTS)
    with pytest.raises(ValueError, match=r"must hold \d+ values of an exchange between 2 ranks"):
        layer(x, ids, weights, batch, pairs, small)


@pytest.mark.parametrize("rows", [ROWS, torch.full((10,), -1, dtype=torch.int32)])
def test_a_delta_of_pairs_without_a_group_refuses_slots_that_are_sharded(rows: Tensor) -> None:
    layer = Group.of(2).ranks[0]
    batch, pairs = prepared(layer, rows)
    pairs.prepare(routes(10)[0], batch)
    workspace = MoEWorkspace([layer.w13_slots], max_tokens=MOST, top_k=TOP_K)
    x, out = randn(10, HIDDEN, seed=3), torch.zeros(10 * TOP_K, layer.w13_slots.out_features)
    with pytest.raises(ValueError, match=r"must hold all 6 ranks of A.*\(got 3\)"):
        moe_delta(x, layer.w13_slots, pairs, workspace, out)
    assert not out.any()


def test_a_batch_that_is_known_to_have_base_rows_alone_exchanges_nothing() -> None:
    layer, x = Group.of(2).ranks[0], randn(10, HIDDEN, seed=3)
    ids, weights = routes(10)
    # outside of `run` an exchange raises
    rows = torch.full((10,), -1, dtype=torch.int32)
    sharded_out = step_of(layer, x, ids, weights, rows)()
    for slot in range(SLOTS):
        layer.unload(slot)
    plain = FusedMoELoRA(
        randn(EXPERTS, 2 * INTER, HIDDEN, seed=1),
        randn(EXPERTS, HIDDEN, INTER, seed=2),
        num_slots=SLOTS,
        rank=RANK,
        gate_up=GateUp.HALVES,
        place=MoERank(tp_size=2),
    )
    assert torch.equal(sharded_out, step_of(plain, x, ids, weights, rows)())


def test_a_second_stream_is_left_out_with_one_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    group, x = Group.of(2), randn(10, HIDDEN, seed=3)
    plain = group.parts(x, *routes(10))
    monkeypatch.setattr(ops, "dual_stream", lambda device: True)
    sharded.warn_of_one_stream.cache_clear()
    with pytest.warns(UserWarning, match=f"{DUAL_STREAM}=1 has no effect"):
        switched = group.parts(x, *routes(10))
    assert all(map(torch.equal, switched, plain))
    for form in (MoEForm.BESIDE, MoEForm.DUAL):
        with pytest.raises(ValueError, match=rf"must be SINGLE \(got {form.name}\)"):
            step_of(group.ranks[0], x, *routes(10), ROWS, form=form)()


@pytest.mark.parametrize(
    ("sharding", "form"), [(LoRASharding.RANK, MoEForm.SINGLE), (LoRASharding.BASE, None)]
)
def test_shared_experts_of_a_layer_sharded_by_rank_have_no_stream_of_their_own(
    monkeypatch: pytest.MonkeyPatch, sharding: LoRASharding, form: MoEForm | None
) -> None:
    forms = []

    def noted(routed: object, shared: object, x: Tensor, given: object, **_: object) -> Tensor:
        forms.append(given)
        return x

    monkeypatch.setattr(moe, "add_shared", noted)
    layer = Group.of(2).ranks[0] if sharding is LoRASharding.RANK else Group.of(1).whole
    x = randn(10, HIDDEN, seed=3)
    step_of(layer, x, *routes(10), ROWS, shared=lambda own: own)()
    # None leaves it to the plan, which may give them one
    assert forms == [form]


def test_the_operator_itself_runs_adapters_that_are_sharded_on_one_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # of the first groups of a process, one has the number 0
    monkeypatch.setattr(collectives, "_NUMBERS", itertools.count())
    monkeypatch.setattr(collectives, "_COLLECTIVES", WeakValueDictionary())
    group, x = Group.of(2), randn(10, HIDDEN, seed=3)
    plain = group.parts(x, *routes(10))
    # for a caller without the layer
    monkeypatch.setattr(FusedMoELoRA, "_form", lambda self, form: form)
    monkeypatch.setattr(ops, "dual_stream", lambda device: True)
    monkeypatch.setattr(ops, "plan_form", lambda *given, **options: MoEForm.DUAL)
    sharded.warn_of_one_stream.cache_clear()
    with pytest.warns(UserWarning, match=f"{DUAL_STREAM}=1 has no effect"):
        switched = group.parts(x, *routes(10))
    assert all(map(torch.equal, switched, plain))
    with pytest.raises(ValueError, match=r"must be SINGLE \(got DUAL\)"):
        step_of(group.ranks[0], x, *routes(10), ROWS, form=MoEForm.DUAL)()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"collective": None}, r"collective must be a group with sharding rank \(got None\)"),
        ({"sharding": LoRASharding.BASE}, "collective must be None with sharding base"),
        (
            {"collective": SimulatedRanks(2).rank(1)},
            r"collective must be rank 0 of 2 like the layer \(got 1 of 2\)",
        ),
        ({"rank": 512, "place": MoERank(tp_size=3)}, "collective must be rank 0 of 3"),
        (
            {
                "rank": 512,
                "place": MoERank(tp_size=3),
                "collective": SimulatedRanks(3).rank(0),
            },
            r"rank must be at most 510 where 3 ranks hold equal parts of it \(got 513,",
        ),
        (
            {"place": MoERank(tp_size=24), "collective": SimulatedRanks(24).rank(0)},
            r"must have 24 hidden features or more \(got 19\)",
        ),
    ],
)
def test_a_layer_that_cannot_be_sharded_is_refused(options: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {
        "num_slots": 2,
        "rank": 8,
        "gate_up": GateUp.HALVES,
        "place": MoERank(tp_size=2),
        "padded_intermediate": 24,
        "sharding": LoRASharding.RANK,
        "collective": SimulatedRanks(2).rank(0),
    }
    weights = randn(EXPERTS, 2 * INTER, HIDDEN, seed=1), randn(EXPERTS, HIDDEN, INTER, seed=2)
    with pytest.raises(ValueError, match=message):
        FusedMoELoRA(*weights, **(given | options))
