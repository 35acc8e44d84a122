"""Times a whole MoE layer, without adapters and with them.

Invariant: a layer is timed only after its result was compared with fp64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from loragate.bench.contender import Contender, Yardstick
from loragate.bench.lorakernels_layer import ExpertsLayer
from loragate.bench.moe_delta import SEED, make_step
from loragate.bench.moe_figures import LayerFigures
from loragate.bench.moe_rows import LAYER_TOKENS, LayerRow
from loragate.bench.timer import Clock
from loragate.bench.vllm_layer import FusedExperts, load_fused_experts
from loragate.core.machine import Machine
from loragate.inputs import DataKind, make_pool, torch_dtype
from loragate.inputs.draw import Draw
from loragate.inputs.pairs import OutRows
from loragate.matrix.case import Case
from loragate.oracles.numeric.deltas import deltas
from loragate.oracles.numeric.grouped import GroupedRows
from loragate.protocol import Pool, Routes

_BASE, _LORA, _BASELINE = "without adapters", "with adapters", "baseline"


@dataclass(frozen=True, slots=True)
class _Layer:
    """Base weights and adapters, and the implementations that run them."""

    w13: Tensor
    w2: Tensor
    pools: tuple[Pool, Pool]
    ours: ExpertsLayer
    theirs: FusedExperts | None


@dataclass(frozen=True, slots=True)
class LayerStep:
    x: Tensor
    token_slots: Tensor
    routes: Routes


def measure_layers(
    rows: Sequence[LayerRow],
    candidate: Contender,
    baseline: Contender | None,
    machine: Machine,
    clock: Clock,
    progress: Callable[[str], None],
) -> Iterator[LayerFigures]:
    """Raises WrongResult. Only vLLM has a baseline layer; `progress` gets the reason where that
    cannot be called."""
    if not rows:
        return
    first, second = replace(rows[0], tokens=max(LAYER_TOKENS)).deltas
    cases = (first.case, second.case)
    found = load_fused_experts(machine) if baseline and baseline.subject.name == "vllm" else None
    if isinstance(found, str):
        progress(f"no baseline of a whole layer: vllm: {found}")
    theirs = None if isinstance(found, str) else found
    layer = _open(cases, candidate, theirs, machine)
    for row in rows:
        yield _measure_row(row, layer, machine, clock)


def _open(
    cases: tuple[Case, Case],
    candidate: Contender,
    theirs: FusedExperts | None,
    machine: Machine,
) -> _Layer:
    w13, w2 = draw_weights(cases, machine)
    first, second = (make_pool(c, SEED, DataKind.SIGNED, machine, candidate.have) for c in cases)
    ours = ExpertsLayer(w13, w2, cases, machine)
    ours.load((first, second))
    return _Layer(w13, w2, (first, second), ours, theirs)


def draw_weights(cases: tuple[Case, Case], machine: Machine) -> tuple[Tensor, Tensor]:
    """w13 and w2, whose products are about 1."""
    draw, dtype = Draw(machine, SEED, "layer"), torch_dtype(cases[0].dtype)

    def weight(case: Case) -> Tensor:
        size = case.in_features**-0.5
        values = draw.normal(case.experts, case.out_features, case.in_features).to(dtype)
        return values.mul_(size)

    return weight(cases[0]), weight(cases[1])


def _measure_row(row: LayerRow, layer: _Layer, machine: Machine, clock: Clock) -> LayerFigures:
    step = make_layer_step(row, machine)
    layer.ours.prepare(step.token_slots)
    calls, errors = _calls(layer, step), {}
    for with_adapters in (False, True):
        yardstick = _yardstick(row, layer, step, with_adapters=with_adapters)
        for name, call in calls.items():
            if (name == _LORA) is with_adapters:
                errors[name] = yardstick.check(name, row.id, call())
    times = clock(calls)
    return LayerFigures(row, times[_BASE], times[_LORA], times.get(_BASELINE), errors)


def _calls(layer: _Layer, step: LayerStep) -> Mapping[str, Callable[[], Tensor]]:
    out = torch.empty_like(step.x)
    calls: dict[str, Callable[[], Tensor]] = {
        _BASE: partial(layer.ours.without, step.x, step.routes, out),
        _LORA: partial(layer.ours.with_adapters, step.x, step.routes, out),
    }
    weights = step.routes.weights
    if layer.theirs is not None and weights is not None:
        ids = step.routes.topk_ids
        calls[_BASELINE] = partial(layer.theirs, step.x, layer.w13, layer.w2, weights, ids)
    return calls


def make_layer_step(row: LayerRow, machine: Machine) -> LayerStep:
    batch = make_step(row.deltas[0], machine)
    assert batch.routes is not None
    draw = Draw(machine, SEED, "router", row.tokens)
    weights = draw.uniform(0.05, 0.2, *batch.routes.topk_ids.shape)
    return LayerStep(batch.x, batch.token_slots, replace(batch.routes, weights=weights))


def _yardstick(row: LayerRow, layer: _Layer, step: LayerStep, *, with_adapters: bool) -> Yardstick:
    pools = layer.pools if with_adapters else None
    right = layer_output(layer.w13, layer.w2, pools, step, torch.float64)
    # a plain layer rounds what it writes: the activation, the output of each pair, their sum
    plain = layer_output(layer.w13, layer.w2, pools, step, torch.float32, rounded=step.x.dtype)
    return Yardstick.of_results(right, plain, row.deltas[0].case.dtype)


def layer_output(
    w13: Tensor,
    w2: Tensor,
    pools: tuple[Pool, Pool] | None,
    step: LayerStep,
    dtype: torch.dtype,
    *,
    rounded: torch.dtype | None = None,
) -> Tensor:
    """[tokens, hidden]: products in `dtype`, their results rounded to `rounded`."""
    routes, stored = step.routes, rounded or dtype
    assert routes.weights is not None
    tokens, top_k = routes.topk_ids.shape
    experts = routes.topk_ids.flatten().long()
    pairs = torch.arange(len(experts), device=experts.device)
    slots = step.token_slots.repeat_interleave(top_k)
    grouped = GroupedRows(experts, len(w13))

    def product(x: Tensor, x_rows: Tensor, weight: Tensor, pool: Pool | None) -> Tensor:
        out = grouped.times(x[x_rows].to(dtype), weight)
        if pool is not None:
            out += deltas(pool, x, OutRows(x_rows, slots, experts, None), dtype)
        return out

    first, second = pools or (None, None)
    gate, up = product(step.x, pairs // top_k, w13, first).chunk(2, dim=1)
    act = (functional.silu(gate) * up).to(stored)
    y = product(act, pairs, w2, second) * routes.weights.to(dtype).flatten()[:, None]
    return y.to(stored).to(dtype).view(tokens, top_k, -1).sum(dim=1).to(stored)
