"""A whole MoE layer against its definition in fp64: one rank, several, quantised."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from loragate.core.machine import detect_machine
from lorakernels.batch.metadata import BatchMetadata
from lorakernels.dense.weights import LoRAFactors
from lorakernels.layers.moe import FusedMoELoRA, MoEScratch
from lorakernels.layers.moe_partition import MoERank
from lorakernels.moe.align.metadata import PairMetadata
from lorakernels.moe.layer.ops import Quantised, RouterWeight, quantise_rows
from lorakernels.moe.weights import ExpertFactors

EXPERTS, HIDDEN, INTER, RANK, SLOTS = 5, 24, 20, 6, 3
_TOP_K = 2
# slot 1 is never loaded; base rows and both adapters meet in the tiles of one expert
_TOKEN_SLOTS = (0, -1, 2, 2, 0, 1, -1, 0, 2)
_TOKENS = len(_TOKEN_SLOTS)
_GATED, _PLAIN = ("gate_proj", "up_proj", "down_proj"), ("up_proj", "down_proj")
# fp32 throughout, sums of a few dozen terms
_CLOSE = 2e-4

Parts = Mapping[str, ExpertFactors]
Adapters = Mapping[int, Parts]


@dataclass(frozen=True, slots=True)
class _Layer:
    """The configuration of the layer and of its definition."""

    w13: Tensor
    w2: Tensor
    adapters: Adapters
    projections: tuple[str, ...] = _GATED
    on_input: bool = False


def check_expert_layer() -> str | None:
    """Gate and up or up alone, router weights on input or output, factors shared or not."""
    for projections, on_input in product((_GATED, _PLAIN), (False, True)):
        layer = _layer(projections, on_input=on_input)
        wrong = _compare(_run(layer), _wanted(layer))
        if wrong is not None:
            return f"{' '.join(projections)}, router weights on input {on_input}: {wrong}"
    shared = _layer(_GATED, shared=True)
    wrong = _compare(_run(shared, shared_outer=True), _wanted(shared))
    return None if wrong is None else f"shared outer factors: {wrong}"


def check_expert_ranks() -> str | None:
    """The parts of all ranks add up to the whole layer, padded or not."""
    layer = _layer(_GATED)
    wanted = _wanted(layer)
    for ep_size, tp_size, padded in ((2, 1, None), (1, 2, None), (1, 2, 32), (2, 2, None)):
        total = torch.zeros_like(wanted)
        for rank in range(ep_size * tp_size):
            place = MoERank.of_group(rank, ep_size=ep_size, tp_size=tp_size)
            total += _run(layer, place=place, padded_intermediate=padded)
        wrong = _compare(total, wanted)
        if wrong is not None:
            return f"ep {ep_size}, tp {tp_size}, padded to {padded}: {wrong}"
    return None


def check_expert_quantised() -> str | None:
    """Base weights see quantised activations, adapters never do (vllm #42120)."""
    layer, x = _layer(_GATED), 37.0 * _x()
    none13, none2 = torch.zeros_like(layer.w13), torch.zeros_like(layer.w2)
    options: dict[str, Any] = {"dtype": torch.float32, "x": x, "quantised_x": quantise_rows(x)}
    # with base weights of zero only the adapters contribute
    alone = _Layer(none13, none2, layer.adapters)
    weights = (_of_8_bits(none13), _of_8_bits(none2))
    wrong = _compare(_run(alone, weights=weights, **options), _wanted(alone, x))
    if wrong is not None:
        return f"adapters without base weights: {wrong}"
    # with a down projection that only the adapter has, nothing is quantised a second time
    back = {0: {"experts.down_proj": layer.adapters[0]["experts.down_proj"]}}
    w13 = _of_8_bits(layer.w13)
    first = _Layer(_expand(w13), none2, back)
    result = _run(first, weights=(w13, _of_8_bits(none2)), **options)
    wrong = _compare(result, _wanted(first, _expand(options["quantised_x"])))
    return None if wrong is None else f"base weights of the first product: {wrong}"


def stacked(projections: tuple[str, ...], rank: int, seed: int, *, shared: bool = False) -> Parts:
    """Factors of all experts, with a scale of its own for each projection."""
    parts = {}
    for index, projection in enumerate(projections):
        down = projection == "down_proj"
        inputs, width = (INTER, HIDDEN) if down else (HIDDEN, INTER)
        a = _randn(1 if shared and not down else EXPERTS, rank, inputs, seed=seed + index)
        b = _randn(1 if shared and down else EXPERTS, width, rank, seed=seed + 10 + index)
        scale = 0.5 + 0.75 * index
        parts[f"experts.{projection}"] = ExpertFactors(a / inputs**0.5, b / rank**0.5, scale)
    return parts


def numbered(parts: Parts) -> dict[str, LoRAFactors]:
    """The same adapter with a module for each expert."""
    return {
        name.replace("experts.", f"experts.{expert}."): LoRAFactors(
            factors.a[expert % len(factors.a)], factors.b[expert % len(factors.b)], factors.scale
        )
        for name, factors in parts.items()
        for expert in range(EXPERTS)
    }


def _layer(projections: tuple[str, ...], *, on_input: bool = False, shared: bool = False) -> _Layer:
    rows = INTER * (len(projections) - 1)
    large = stacked(projections, RANK, 100, shared=shared)
    small = stacked(projections, 3, 200, shared=shared)
    # the second adapter has no factors for the down projection
    adapters = {0: large, 2: {n: p for n, p in small.items() if "down" not in n}}
    w13 = _randn(EXPERTS, rows, HIDDEN, seed=1) / HIDDEN**0.5
    w2 = _randn(EXPERTS, HIDDEN, INTER, seed=2) / INTER**0.5
    return _Layer(w13, w2, adapters, projections, on_input)


def _x() -> Tensor:
    return _randn(_TOKENS, HIDDEN, seed=3)


def _routing() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(4)
    ids = torch.rand(_TOKENS, EXPERTS, generator=generator).argsort(1)[:, :_TOP_K]
    router = torch.rand(_TOKENS, _TOP_K, generator=generator) + 0.1
    return ids.int().contiguous(), router


def _run(
    layer: _Layer,
    *,
    x: Tensor | None = None,
    weights: tuple[Quantised, Quantised] | None = None,
    quantised_x: Quantised | None = None,
    **options: Any,
) -> Tensor:
    device = detect_machine().device
    x = (_x() if x is None else x).to(device)
    ids, router = (tensor.to(device) for tensor in _routing())
    w13, w2 = weights or (layer.w13, layer.w2)
    module = FusedMoELoRA(
        _moved(w13, device),
        _moved(w2, device),
        num_slots=SLOTS,
        rank=RANK,
        projections=layer.projections,
        router_weight=RouterWeight.ON_INPUT if layer.on_input else RouterWeight.ON_OUTPUT,
        **options,
    )
    for slot, parts in layer.adapters.items():
        module.load_adapter(slot, parts)
    # larger buffers than the step needs, filled with values that must not be read
    most = _TOKENS + 2
    batch = BatchMetadata(max_tokens=most, max_slots=SLOTS, device=device)
    batch.prepare(torch.tensor(_TOKEN_SLOTS, dtype=torch.int32))
    pairs = PairMetadata(
        max_tokens=most,
        top_k=_TOP_K,
        num_experts=module.cut.experts.size,
        max_slots=SLOTS,
        device=device,
        with_base=True,
    )
    scratch = MoEScratch([module], max_tokens=most, top_k=_TOP_K)
    for buffer in (scratch.buffers.act, scratch.buffers.y, scratch.workspace.shrunk):
        buffer.fill_(float("nan"))
    moved_x = None if quantised_x is None else _moved(quantised_x, device)
    result = module(x, ids, router, batch, pairs, scratch, quantised_x=moved_x)
    return result.double().cpu()  # type: ignore[no-any-return]


def _wanted(layer: _Layer, base_x: Tensor | None = None) -> Tensor:
    """fp64. `base_x` takes the place of x, for adapters too where base weights are zero."""
    x = (_x() if base_x is None else base_x).double()
    ids, router = _routing()
    out = torch.zeros(_TOKENS, HIDDEN, dtype=torch.float64)
    for token, choice in product(range(_TOKENS), range(_TOP_K)):
        expert, weight = int(ids[token, choice]), float(router[token, choice])
        parts = layer.adapters.get(_TOKEN_SLOTS[token], {})
        inner = _with_deltas(layer.w13[expert], parts, layer.projections[:-1], expert) @ x[token]
        inner = inner * (weight if layer.on_input else 1.0)
        if len(layer.projections) == len(_GATED):
            gate, up = inner.chunk(2)
            inner = F.silu(gate) * up
        else:
            inner = F.silu(inner)
        second = _with_deltas(layer.w2[expert], parts, layer.projections[-1:], expert)
        out[token] += second @ inner * (1.0 if layer.on_input else weight)
    return out


def _with_deltas(weight: Tensor, parts: Parts, projections: tuple[str, ...], expert: int) -> Tensor:
    rows = []
    for name, own in zip(projections, weight.double().chunk(len(projections)), strict=True):
        part = parts.get(f"experts.{name}")
        if part is not None:
            a, b = part.a[expert % len(part.a)], part.b[expert % len(part.b)]
            own = own + part.scale * b.double() @ a.double()
        rows.append(own)
    return torch.cat(rows)


def _compare(found: Tensor, wanted: Tensor) -> str | None:
    error = (found - wanted).abs().amax(1) / wanted.abs().max()
    # a NaN is no small error
    worst = torch.where(error.isnan(), torch.inf, error)
    token = int(worst.argmax())
    if worst[token] <= _CLOSE:
        return None
    return f"token {token} of slot {_TOKEN_SLOTS[token]} is off by {float(worst[token]):.3g}"


def _of_8_bits(weight: Tensor) -> Quantised:
    rows = quantise_rows(weight.flatten(0, 1))
    return Quantised(rows.values.view(weight.shape), rows.scales.view(weight.shape[:2]))


def _expand(quantised: Quantised) -> Tensor:
    return quantised.values.float() * quantised.scales[..., None]


def _moved(weight: Any, device: str) -> Any:
    if isinstance(weight, Quantised):
        return Quantised(weight.values.to(device), weight.scales.to(device))
    return weight.to(device)


def _randn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
