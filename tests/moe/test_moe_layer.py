"""FusedMoELoRA in a batch: each row with its own adapter, against the definition in fp64."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from lorakernels.batch.metadata import BatchMetadata
from lorakernels.common.quantised import Quantised, quantise_rows
from lorakernels.layers.gate_up import GateUp
from lorakernels.layers.moe import FusedMoELoRA, MoEScratch
from lorakernels.layers.moe_partition import MoERank
from lorakernels.moe.align.metadata import PairMetadata
from lorakernels.moe.layer.ops import RouterWeight
from lorakernels.moe.weights import ExpertFactors

EXPERTS, HIDDEN, INTERMEDIATE, RANK, SLOTS = 4, 24, 20, 5, 3
TOKENS, TOP_K = 7, 2
PLAIN = ("up_proj", "down_proj")
GATED = ("gate_proj", "up_proj", "down_proj")
# slot 1 is never loaded
TOKEN_SLOTS = (0, -1, 2, 2, 0, 1, -1)
Parts = Mapping[str, ExpertFactors]


def randn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def weights(projections: tuple[str, ...] = GATED) -> tuple[Tensor, Tensor]:
    rows = INTERMEDIATE * (len(projections) - 1)
    w13 = randn(EXPERTS, rows, HIDDEN, seed=1) / HIDDEN**0.5
    return w13, randn(EXPERTS, HIDDEN, INTERMEDIATE, seed=2) / INTERMEDIATE**0.5


def factors(projections: tuple[str, ...], rank: int, seed: int, *, shared: bool = False) -> Parts:
    parts = {}
    for index, projection in enumerate(projections):
        down = projection == "down_proj"
        inputs, width = (INTERMEDIATE, HIDDEN) if down else (HIDDEN, INTERMEDIATE)
        a_experts = 1 if shared and not down else EXPERTS
        b_experts = 1 if shared and down else EXPERTS
        a = randn(a_experts, rank, inputs, seed=seed + index) / inputs**0.5
        b = randn(b_experts, width, rank, seed=seed + index + 10) / rank**0.5
        parts[f"experts.{projection}"] = ExpertFactors(a, b, 0.5 + index)
    return parts


def adapters(projections: tuple[str, ...] = GATED, *, shared: bool = False) -> dict[int, Parts]:
    large = factors(projections, RANK, 100, shared=shared)
    small = factors(projections, 2, 200, shared=shared)
    # the second one has no factors for the down projection
    return {0: large, 2: {n: p for n, p in small.items() if "down" not in n}}


@dataclass
class Batch:
    x: Tensor
    ids: Tensor
    router: Tensor

    @classmethod
    def draw(cls) -> Batch:
        ids = torch.rand(TOKENS, EXPERTS, generator=torch.Generator().manual_seed(4)).argsort(1)
        router = torch.rand(TOKENS, TOP_K, generator=torch.Generator().manual_seed(5)) + 0.1
        return cls(randn(TOKENS, HIDDEN, seed=3), ids[:, :TOP_K].int().contiguous(), router)


def run(layer: FusedMoELoRA, batch: Batch, slots: tuple[int, ...], **options: Any) -> Tensor:
    metadata = BatchMetadata(max_tokens=TOKENS + 2, max_slots=SLOTS, device="cpu")
    metadata.prepare(torch.tensor(slots, dtype=torch.int32))
    pairs = PairMetadata(
        max_tokens=TOKENS + 2,
        top_k=TOP_K,
        num_experts=layer.cut.experts.size,
        max_slots=SLOTS,
        device="cpu",
        with_base=True,
    )
    scratch = MoEScratch([layer], max_tokens=TOKENS + 2, top_k=TOP_K)
    for buffer in (scratch.buffers.act, scratch.buffers.y, scratch.workspace.shrunk):
        buffer.fill_(float("nan"))
    return layer(batch.x, batch.ids, batch.router, metadata, pairs, scratch, **options)


def plus(weight: Tensor, parts: Parts, projections: tuple[str, ...]) -> Tensor:
    """Weights of all experts with the deltas of one adapter, in fp64."""
    rows = []
    for projection, rows_of in zip(
        projections, weight.double().chunk(len(projections), dim=1), strict=True
    ):
        part = parts.get(f"experts.{projection}")
        rows.append(
            rows_of if part is None else rows_of + part.scale * part.b.double() @ part.a.double()
        )
    return torch.cat(rows, dim=1)


def reference(
    batch: Batch,
    loaded: Mapping[int, Parts],
    slots: tuple[int, ...],
    projections: tuple[str, ...] = GATED,
    *,
    on_input: bool = False,
) -> Tensor:
    w13, w2 = weights(projections)
    out = torch.zeros(TOKENS, HIDDEN, dtype=torch.float64)
    for token, slot in enumerate(slots):
        parts = loaded.get(slot, {})
        first, second = plus(w13, parts, projections[:-1]), plus(w2, parts, projections[-1:])
        for expert, weight in zip(
            batch.ids[token].tolist(), batch.router[token].double(), strict=True
        ):
            inner = first[expert] @ batch.x[token].double() * (weight if on_input else 1)
            if len(projections) == 3:
                gate, up = inner.chunk(2)
                inner = F.silu(gate) * up
            else:
                inner = F.silu(inner)
            out[token] += second[expert] @ inner * (1 if on_input else weight)
    return out


def build(projections: tuple[str, ...] = GATED, **options: Any) -> FusedMoELoRA:
    loaded = options.pop("loaded", adapters(projections, shared=options.get("shared_outer", False)))
    fields = {"num_slots": SLOTS, "rank": RANK, "projections": projections} | options
    fields["gate_up"] = GateUp.HALVES if len(projections) == 3 else None
    layer = FusedMoELoRA(*weights(projections), **fields)
    for slot, parts in loaded.items():
        layer.load_adapter(slot, parts)
    return layer


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(("ep", "tp"), [(1, 1), (2, 1), (1, 2), (3, 2)])
def test_the_ranks_of_a_group_add_up_to_the_definition(ep: int, tp: int, shared: bool) -> None:
    batch = Batch.draw()
    total = torch.zeros(TOKENS, HIDDEN)
    for rank in range(ep * tp):
        place = MoERank.of_group(rank, ep_size=ep, tp_size=tp)
        layer = build(place=place, shared_outer=shared, padded_intermediate=24)
        total += run(layer, batch, TOKEN_SLOTS)
    wanted = reference(batch, adapters(shared=shared), TOKEN_SLOTS).float()
    torch.testing.assert_close(total, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("router_weight", RouterWeight)
@pytest.mark.parametrize("projections", [PLAIN, GATED], ids=["plain", "gated"])
def test_router_weights_apply_to_the_input_or_the_output(
    projections: tuple[str, ...], router_weight: RouterWeight
) -> None:
    batch = Batch.draw()
    out = run(build(projections, router_weight=router_weight), batch, TOKEN_SLOTS)
    on_input = router_weight is RouterWeight.ON_INPUT
    loaded = adapters(projections)
    wanted = reference(batch, loaded, TOKEN_SLOTS, projections, on_input=on_input)
    torch.testing.assert_close(out, wanted.float(), rtol=1e-4, atol=1e-4)


def test_base_rows_are_those_of_a_layer_that_has_no_adapters() -> None:
    batch = Batch.draw()
    without = run(build(loaded={}), batch, TOKEN_SLOTS)
    out = run(build(), batch, TOKEN_SLOTS)
    base = [token for token, slot in enumerate(TOKEN_SLOTS) if slot in (-1, 1)]
    assert torch.equal(out[base], without[base])
    assert not torch.equal(out, without)


def test_an_adapter_that_was_unloaded_changes_no_row() -> None:
    batch = Batch.draw()
    layer = build()
    layer.unload(0)
    layer.load_adapter(2, factors(GATED, 1, 300))
    fresh = build(loaded={2: factors(GATED, 1, 300)})
    assert torch.equal(run(layer, batch, TOKEN_SLOTS), run(fresh, batch, TOKEN_SLOTS))


def test_an_output_has_the_shape_of_its_input() -> None:
    batch = Batch.draw()
    flat = run(build(), batch, TOKEN_SLOTS)
    batch.x = batch.x[None].expand(1, TOKENS, HIDDEN)
    assert torch.equal(run(build(), batch, TOKEN_SLOTS), flat[None])


def of_8_bits(weight: Tensor) -> Quantised:
    rows = quantise_rows(weight.flatten(0, 1))
    return Quantised(rows.values.view(weight.shape), rows.scales.view(weight.shape[:2]))


def expand(quantised: Quantised) -> Tensor:
    return quantised.values.float() * quantised.scales[..., None]


@pytest.mark.parametrize("tp", [1, 2])
def test_adapters_are_applied_to_activations_that_are_not_quantised(tp: int) -> None:
    # vllm #42120: 8-bit values without their scale; base weights of zero leave the adapter alone
    batch = Batch.draw()
    batch.x *= 37.0
    nothing = [of_8_bits(torch.zeros_like(w)) for w in weights()]
    total = torch.zeros(TOKENS, HIDDEN)
    plain = torch.zeros(TOKENS, HIDDEN)
    for rank in range(tp):
        place = MoERank(tp_size=tp, tp_rank=rank)
        options: dict[str, Any] = {"num_slots": SLOTS, "rank": RANK, "place": place}
        quantised = FusedMoELoRA(*nothing, dtype=torch.float32, gate_up=GateUp.HALVES, **options)
        other = FusedMoELoRA(
            *(torch.zeros_like(w) for w in weights()), gate_up=GateUp.HALVES, **options
        )
        for layer in (quantised, other):
            layer.load_adapter(0, adapters()[0])
        slots = (0,) * TOKENS
        total += run(quantised, batch, slots, quantised_x=quantise_rows(batch.x))
        plain += run(other, batch, slots)
    assert plain.abs().max() > 1
    torch.testing.assert_close(total, plain, rtol=1e-4, atol=1e-4)


def test_base_weights_are_applied_to_the_quantised_activations() -> None:
    batch = Batch.draw()
    w13, w2 = weights()
    options: dict[str, Any] = {"num_slots": SLOTS, "rank": RANK}
    # only the adapter has a down projection, so that nothing is quantised a second time
    first, none = of_8_bits(w13), of_8_bits(torch.zeros_like(w2))
    layer = FusedMoELoRA(first, none, dtype=torch.float32, gate_up=GateUp.HALVES, **options)
    same = FusedMoELoRA(expand(first), torch.zeros_like(w2), gate_up=GateUp.HALVES, **options)
    back = {"experts.down_proj": adapters()[0]["experts.down_proj"]}
    layer.load_adapter(0, back)
    same.load_adapter(0, back)
    quantised_x = quantise_rows(batch.x * 37.0)
    out = run(layer, batch, (0,) * TOKENS, quantised_x=quantised_x)
    batch.x = expand(quantised_x)
    torch.testing.assert_close(out, run(same, batch, (0,) * TOKENS), rtol=1e-4, atol=1e-4)


def test_quantised_activations_may_have_the_shape_of_the_input() -> None:
    batch = Batch.draw()
    options: dict[str, Any] = {"num_slots": SLOTS, "rank": RANK, "dtype": torch.float32}
    layer = FusedMoELoRA(*map(of_8_bits, weights()), gate_up=GateUp.HALVES, **options)
    rows = quantise_rows(batch.x)
    flat = run(layer, batch, TOKEN_SLOTS, quantised_x=rows)
    batch.x = batch.x[None]
    out = run(
        layer, batch, TOKEN_SLOTS, quantised_x=Quantised(rows.values[None], rows.scales[None])
    )
    assert torch.equal(out, flat[None])


@pytest.mark.parametrize("padded", [None, 24])
def test_quantised_weights_are_cut_with_their_scales(padded: int | None) -> None:
    quantised = [of_8_bits(w) for w in weights()]
    plain = [expand(q) for q in quantised]
    for rank in range(4):
        place = MoERank.of_group(rank, ep_size=2, tp_size=2)
        options: dict[str, Any] = {"num_slots": 1, "rank": 1, "place": place}
        options["padded_intermediate"] = padded
        layer = FusedMoELoRA(*quantised, dtype=torch.bfloat16, gate_up=GateUp.HALVES, **options)
        wanted = FusedMoELoRA(*plain, gate_up=GateUp.HALVES, **options)
        assert layer.w13_slots.a.dtype == torch.bfloat16
        for have, want in (("w13", wanted.w13), ("w2", wanted.w2)):
            values, scales = getattr(layer, have), getattr(layer, f"{have}_scales")
            assert torch.equal(expand(Quantised(values, scales)), want)


@pytest.mark.parametrize(("ep", "tp"), [(1, 1), (2, 1), (4, 1), (1, 2)])
def test_an_adapter_covers_the_projections_of_all_experts_on_each_rank(ep: int, tp: int) -> None:
    for rank in range(ep * tp):
        place = MoERank.of_group(rank, ep_size=ep, tp_size=tp)
        options: dict[str, Any] = {"num_slots": 1, "rank": 1, "place": place}
        parts = FusedMoELoRA(*weights(), gate_up=GateUp.HALVES, **options).parts
        for projection in GATED:
            single = [parts[f"experts.{expert}.{projection}"] for expert in range(EXPERTS)]
            assert [len(part) for part in single] == [1] * EXPERTS
            assert sorted(sum(single, ())) == sorted(parts[f"experts.{projection}"])
        covered = sum((parts[f"experts.{projection}"] for projection in GATED), ())
        assert len({*covered}) == len(covered) == len(GATED) * EXPERTS


def test_a_part_of_a_layer_does_not_keep_the_rest_in_memory() -> None:
    w13, w2 = weights()
    place = MoERank.of_group(1, ep_size=2, tp_size=1)
    layer = FusedMoELoRA(w13, w2, gate_up=GateUp.HALVES, num_slots=1, rank=1, place=place)
    for own, whole in ((layer.w13, w13), (layer.w2, w2)):
        assert own.untyped_storage().nbytes() == own.nbytes < whole.nbytes


def test_a_part_of_a_quantised_layer_does_not_keep_the_rest_in_memory() -> None:
    quantised = [of_8_bits(w) for w in weights()]
    place = MoERank.of_group(1, ep_size=2, tp_size=1)
    layer = FusedMoELoRA(
        *quantised,
        dtype=torch.bfloat16,
        gate_up=GateUp.HALVES,
        num_slots=1,
        rank=1,
        place=place,
    )
    for name, whole in zip(("w13", "w2"), quantised, strict=True):
        for own, of_all in (
            (getattr(layer, name), whole.values),
            (getattr(layer, f"{name}_scales"), whole.scales),
        ):
            assert own.untyped_storage().nbytes() == own.nbytes < of_all.nbytes


def test_scratch_of_another_dtype_is_refused() -> None:
    batch, layer = Batch.draw(), build()
    other = FusedMoELoRA(
        *(w.half() for w in weights()), gate_up=GateUp.HALVES, num_slots=SLOTS, rank=RANK
    )
    scratch = MoEScratch([other], max_tokens=TOKENS, top_k=TOP_K)
    rows = BatchMetadata(max_tokens=TOKENS, max_slots=SLOTS, device="cpu")
    rows.prepare(torch.tensor(TOKEN_SLOTS, dtype=torch.int32))
    pairs = PairMetadata(
        max_tokens=TOKENS,
        top_k=TOP_K,
        num_experts=EXPERTS,
        max_slots=SLOTS,
        device="cpu",
        with_base=True,
    )
    message = "act of buffers must be torch.float32 (got torch.float16)"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        layer(batch.x, batch.ids, batch.router, rows, pairs, scratch)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.ones(TOKENS, 8)}, "x must have 24 columns (got 8)"),
        ({"x": torch.ones(TOKENS, 25)}, "x must have 24 columns (got 25)"),
        (
            {"x": torch.ones(TOKENS, HIDDEN).to(torch.float8_e4m3fn)},
            "x must be torch.float32 as it is before quantising (got torch.float8_e4m3fn)",
        ),
        (
            {"router": torch.ones(TOKENS, TOP_K).half()},
            "topk_weights must be torch.float32 (got torch.float16)",
        ),
        (
            {"ids": torch.zeros(TOKENS, TOP_K).long()},
            "topk_ids must be int32 with 2 dimensions (got torch.int64 with shape [7, 2])",
        ),
    ],
)
def test_a_wrong_input_is_refused_by_field(change: dict[str, Any], message: str) -> None:
    batch = Batch.draw()
    for field, value in change.items():
        setattr(batch, field, value)
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        run(build(), batch, TOKEN_SLOTS)


def test_quantised_inputs_and_quantised_weights_go_together() -> None:
    batch = Batch.draw()
    with pytest.raises(ValueError, match="must be None with weights that are not quantised"):
        run(build(), batch, TOKEN_SLOTS, quantised_x=quantise_rows(batch.x))
    quantised = [of_8_bits(w) for w in weights()]
    layer = FusedMoELoRA(
        *quantised, gate_up=GateUp.HALVES, num_slots=SLOTS, rank=RANK, dtype=torch.float32
    )
    with pytest.raises(ValueError, match="must be given with weights that are quantised"):
        run(layer, batch, TOKEN_SLOTS)
    with pytest.raises(ValueError, match="dtype must be given with weights of"):
        FusedMoELoRA(*quantised, gate_up=GateUp.HALVES, num_slots=SLOTS, rank=RANK)
    with pytest.raises(ValueError, match="w13 and w2 must"):
        FusedMoELoRA(quantised[0], weights()[1], gate_up=GateUp.HALVES, num_slots=SLOTS, rank=RANK)
    wrong = Quantised(quantised[0].values, quantised[0].scales[:, :1])
    message = re.escape("scales of w13 must be [4, 40] (got [4, 1])")
    with pytest.raises(ValueError, match=f"^{message}$"):
        FusedMoELoRA(
            wrong,
            quantised[1],
            gate_up=GateUp.HALVES,
            num_slots=SLOTS,
            rank=RANK,
            dtype=torch.float32,
        )


def test_quantised_inputs_of_any_strides_are_those_of_the_rows() -> None:
    batch = Batch.draw()
    quantised = [of_8_bits(w) for w in weights()]
    layer = FusedMoELoRA(
        *quantised, gate_up=GateUp.HALVES, num_slots=SLOTS, rank=RANK, dtype=torch.float32
    )
    given = quantise_rows(batch.x)
    wanted = run(layer, batch, TOKEN_SLOTS, quantised_x=given)
    # a column of a wider tensor
    scales = torch.stack([given.scales, given.scales * 3], dim=1)[:, 0]
    strided = Quantised(given.values.t().contiguous().t(), scales)
    assert torch.equal(run(layer, batch, TOKEN_SLOTS, quantised_x=strided), wanted)
    short = Quantised(given.values[:-1], given.scales[:-1])
    message = re.escape(f"quantised_x must be [{TOKENS}, {HIDDEN}] (got [6, {HIDDEN}])")
    with pytest.raises(ValueError, match=f"^{message}$"):
        run(layer, batch, TOKEN_SLOTS, quantised_x=short)
    for values in (given.values.view(-1, HIDDEN // 2), given.values.repeat(1, 2)):
        other = Quantised(values, given.scales)
        message = re.escape(f"quantised_x must have {HIDDEN} columns (got {values.shape[1]})")
        with pytest.raises(ValueError, match=f"^{message}$"):
            run(layer, batch, TOKEN_SLOTS, quantised_x=other)
    few = Quantised(given.values, given.scales[:-1])
    message = re.escape(f"scales of quantised_x must be [{TOKENS}] (got [6])")
    with pytest.raises(ValueError, match=f"^{message}$"):
        run(layer, batch, TOKEN_SLOTS, quantised_x=few)
