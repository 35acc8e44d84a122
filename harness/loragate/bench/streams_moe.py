"""Times MoE layers in all forms, with a shared expert and without.

Invariant: a form is timed only after its result was compared with fp64. A layer has buffers for
the largest step of the table, as in a server.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from loragate.bench.contender import Contender, Yardstick
from loragate.bench.lorakernels_moe_streams import MoELayer
from loragate.bench.moe_delta import SEED
from loragate.bench.moe_layer import LayerStep, draw_weights, layer_output, make_layer_step
from loragate.bench.moe_rows import LayerRow
from loragate.bench.streams_measured import FormTimes, MoEFigures
from loragate.bench.streams_rows import MOE_FORMS, MOE_TOKENS, MoERow
from loragate.bench.streams_steps import PLANNED
from loragate.bench.timer import Clock
from loragate.core.machine import Machine
from loragate.inputs import DataKind, make_pool
from loragate.inputs.draw import Draw
from loragate.protocol import Pool


@dataclass(frozen=True, slots=True)
class _Weights:
    """`up` [2 * width, hidden] and `down` [hidden, width] are those of the shared expert."""

    w13: Tensor
    w2: Tensor
    up: Tensor
    down: Tensor
    pools: tuple[Pool, Pool]

    def shared(self, x: Tensor) -> Tensor:
        gate, up = functional.linear(x, self.up.to(x.dtype)).chunk(2, dim=1)
        return functional.linear(functional.silu(gate) * up, self.down.to(x.dtype))


def measure_moes(
    rows: Sequence[MoERow], candidate: Contender, machine: Machine, clock: Clock
) -> Iterator[MoEFigures]:
    """Raises WrongResult."""
    if not rows:
        return
    weights = _draw(candidate, machine)
    largest = MoERow(False, max(MOE_TOKENS)).case
    layer = MoELayer(weights.w13, weights.w2, largest, weights.pools, machine)
    for row in rows:
        yield _measure_row(row, layer, weights, machine, clock)


def _draw(candidate: Contender, machine: Machine) -> _Weights:
    first, second = (delta.case for delta in LayerRow(max(MOE_TOKENS)).deltas)
    w13, w2 = draw_weights((first, second), machine)
    draw, dtype = Draw(machine, SEED, "shared expert"), w13.dtype
    up = draw.normal(*w13.shape[1:]).to(dtype).mul_(first.in_features**-0.5)
    down = draw.normal(*w2.shape[1:]).to(dtype).mul_(second.in_features**-0.5)
    pools = [make_pool(c, SEED, DataKind.SIGNED, machine, candidate.have) for c in (first, second)]
    return _Weights(w13, w2, up, down, (pools[0], pools[1]))


def _measure_row(
    row: MoERow, layer: MoELayer, weights: _Weights, machine: Machine, clock: Clock
) -> MoEFigures:
    step = make_layer_step(row.layer, machine)
    layer.prepare(step.token_slots)
    shared = weights.shared if row.shared else None
    calls: dict[str, Callable[[], Tensor]] = {
        form: partial(layer.run, step.x, step.routes, shared, form) for form in MOE_FORMS
    }
    calls[PLANNED] = partial(layer.run_planned, step.x, step.routes, shared)
    yardstick = _yardstick(row, weights, step)
    errors = {name: yardstick.check(name, row.id, call()) for name, call in calls.items()}
    times = clock(calls)
    chosen = layer.planned(step.routes.topk_ids.numel())
    forms = FormTimes({form: times[form] for form in MOE_FORMS}, chosen, times[PLANNED])
    return MoEFigures(row, forms, errors)


def _yardstick(row: MoERow, weights: _Weights, step: LayerStep) -> Yardstick:
    low, (w13, w2) = step.x.dtype, (weights.w13, weights.w2)
    right = layer_output(w13, w2, weights.pools, step, torch.float64)
    plain = layer_output(w13, w2, weights.pools, step, torch.float32, rounded=low)
    if row.shared:
        right = right + weights.shared(step.x.double())
        plain = (plain.float() + weights.shared(step.x).float()).to(low)
    return Yardstick.of_results(right, plain, row.case.dtype)
