"""What the layers of `bench streams` have in common: their inputs, and the check of their results
before they are timed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial

import torch
from torch import Tensor

from loragate.bench.contender import Yardstick
from loragate.bench.lorakernels_streams import FormedLayer
from loragate.bench.streams_measured import FormTimes
from loragate.core.machine import Machine
from loragate.inputs import torch_dtype
from loragate.inputs.draw import Draw
from loragate.matrix.case import Case
from loragate.protocol import BaseLayer, Batch, Pool

SEED = 1
PLANNED = "planned"
# the outputs of a layer, side by side its columns
Call = Callable[[], tuple[Tensor, ...]]


def draw_base(case: Case, machine: Machine) -> BaseLayer:
    """A weight whose products are about 1, and no bias."""
    values = Draw(machine, SEED, "base").normal(sum(case.slices), case.in_features)
    return BaseLayer(values.mul_(case.in_features**-0.5).to(torch_dtype(case.dtype)), None)


def draw_input(case: Case, machine: Machine) -> Tensor:
    values = Draw(machine, SEED, "step", case.tokens).normal(case.tokens, case.in_features)
    return values.to(torch_dtype(case.dtype))


def calls_of(layer: FormedLayer, x: Tensor, forms: Iterable[str]) -> dict[str, Call]:
    """By form, and what the plan chooses."""
    calls: dict[str, Call] = {form: partial(layer.run, x, form) for form in forms}
    return calls | {PLANNED: partial(layer.run_planned, x)}


def check_calls(
    calls: Mapping[str, Call],
    where: str,
    case: Case,
    step: tuple[Tensor, Tensor],
    base: BaseLayer,
    pool: Pool,
) -> dict[str, float]:
    """The error of each call on a step, which is x and the slots of its rows, over that of a plain
    computation. Raises WrongResult."""
    x, token_slots = step
    # only its shape matters beside a base layer
    out = torch.empty(len(x), sum(case.slices), dtype=x.dtype, device=x.device)
    yardstick = Yardstick.of_step(case, pool, Batch(x, token_slots, out), base)
    return {
        name: yardstick.check(name, where, torch.cat(call(), dim=1)) for name, call in calls.items()
    }


def form_times(
    layer: FormedLayer, tokens: int, forms: Iterable[str], times: Mapping[str, float]
) -> FormTimes:
    return FormTimes({form: times[form] for form in forms}, layer.planned(tokens), times[PLANNED])
