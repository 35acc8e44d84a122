"""Times linear layers on one stream and on two, next to vLLM's.

Invariant: a layer is timed only after its result was compared with fp64. All ways to run it have
the same base weight, adapters and input.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import cast

import torch
from torch import Tensor
from torch.nn import functional as F

from loragate.bench.contender import Contender
from loragate.bench.lorakernels_streams import LinearLayer
from loragate.bench.streams_measured import BaselineTimes, LinearFigures
from loragate.bench.streams_rows import LinearRow
from loragate.bench.streams_steps import (
    SEED,
    Call,
    calls_of,
    check_calls,
    draw_base,
    draw_input,
    form_times,
)
from loragate.bench.timer import Clock
from loragate.bench.vllm_streams import DualStream, Fork, load_fork, sequential
from loragate.core.machine import Machine
from loragate.inputs import DataKind, make_pool
from loragate.protocol import Pool
from loragate.subjects.vllm.subject import VllmInstance

_BASE = "base"
_SEQUENTIAL, _DUAL = "vllm on one stream", "vllm on two streams"


@dataclass(frozen=True, slots=True)
class _Baseline:
    """vLLM; `fork` is None where it offers no second stream."""

    contender: Contender
    fork: Fork | None


def measure_linears(
    rows: Sequence[LinearRow],
    candidate: Contender,
    baseline: Contender | None,
    machine: Machine,
    clock: Clock,
    progress: Callable[[str], None],
) -> Iterator[LinearFigures]:
    """Raises WrongResult. `progress` gets the reason where vLLM has no second stream."""
    if not rows:
        return
    theirs = None
    if baseline is not None:
        fork = load_fork(machine)
        if isinstance(fork, str):
            progress(f"no baseline with two streams: vllm: {fork}")
        theirs = _Baseline(baseline, None if isinstance(fork, str) else fork)
    for row in rows:
        yield _measure_row(row, candidate, theirs, machine, clock)


def _measure_row(
    row: LinearRow,
    candidate: Contender,
    baseline: _Baseline | None,
    machine: Machine,
    clock: Clock,
) -> LinearFigures:
    case, token_slots = row.case, torch.tensor(row.token_slots, dtype=torch.int32)
    base, x = draw_base(case, machine), draw_input(case, machine)
    pool = make_pool(case, SEED, DataKind.SIGNED, machine, candidate.have)
    layer = LinearLayer(case, base, pool)
    layer.prepare(token_slots)
    product = partial(F.linear, x, base.weight)
    taken = layer.forms(row.tokens)
    calls = calls_of(layer, x, taken)
    if baseline is not None:
        calls |= _calls_of_baseline(baseline, row, product, x, pool, machine)
    errors = check_calls(calls, row.id, case, (x, token_slots), base, pool)
    times = clock({_BASE: product, **calls})
    forms = form_times(layer, row.tokens, taken, times)
    theirs = None if baseline is None else _baseline_times(times)
    return LinearFigures(row, times[_BASE], forms, theirs, errors)


def _calls_of_baseline(
    baseline: _Baseline,
    row: LinearRow,
    product: Callable[[], Tensor],
    x: Tensor,
    pool: Pool,
    machine: Machine,
) -> dict[str, Call]:
    instance = cast(VllmInstance, baseline.contender.open(row.case, machine, pool))
    instance.prepare(torch.tensor(row.token_slots, dtype=torch.int32))
    calls: dict[str, Call] = {_SEQUENTIAL: lambda: (sequential(product, instance, x),)}
    if baseline.fork is not None:
        dual = DualStream(baseline.fork, instance, sum(row.shape.slices))
        calls[_DUAL] = lambda: (dual(product, x),)
    return calls


def _baseline_times(times: Mapping[str, float]) -> BaselineTimes:
    return BaselineTimes(times[_SEQUENTIAL], times.get(_DUAL))
