"""`bench dense` on the device: what LoRA adds to a cuBLAS base GEMM, subject by subject.

Invariant: a subject is timed only after its result was compared with fp64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import cast

import torch
from torch import Tensor

from loragate.bench.contender import Contender, Yardstick
from loragate.bench.figures import DenseFigures, RowFigures, StepFigures, Times
from loragate.bench.rows import BASE, BEHIND_BASE, TOKENS, DenseRow
from loragate.bench.timer import (
    Clock,
    copy_bytes_per_s,
    graph_of,
    in_turns,
    in_turns_cold,
    replay_in_turns,
    wall,
)
from loragate.core.machine import Machine
from loragate.inputs import DataKind, make_pool, torch_dtype
from loragate.protocol import Batch, Instance, Resident

_SEED = 1
_STEP_SLOTS = 8
_STEP_ACTIVE = (0, 1, 8)


def run_dense(
    candidate: Contender,
    baseline: Contender | None,
    rows: Sequence[DenseRow],
    machine: Machine,
    progress: Callable[[str], None],
) -> DenseFigures:
    """Measure `rows`. Raises WrongResult for a subject with a wrong result."""
    contenders = [candidate, *([baseline] if baseline else [])]
    copied = copy_bytes_per_s()
    measured = []
    for index, row in enumerate(rows):
        measured.append(measure_row(row, contenders, machine))
        progress(f"[{index + 1}/{len(rows)}] {_line(measured[-1])}")
    progress("metadata")
    steps = [
        figures
        for contender in contenders
        for figures in measure_steps(contender, machine, captured=contender is candidate)
    ]
    return DenseFigures(
        candidate=candidate.subject.name,
        baseline=baseline.subject.name if baseline else None,
        copy_bytes_per_s=copied,
        rows=tuple(measured),
        steps=tuple(steps),
    )


@dataclass(frozen=True, slots=True)
class CallFigures:
    """Microseconds of each call of a subject that `measure` times."""

    row: DenseRow
    us: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class _Step:
    row: DenseRow
    x: Tensor
    out: Tensor
    token_slots: Tensor
    base: Callable[[], Tensor]


def measure_row(row: DenseRow, contenders: Sequence[Contender], machine: Machine) -> RowFigures:
    step, errors = _draw_step(row, machine), {}
    calls: dict[str, Callable[[], object]] = {BASE: step.base}
    for contender in contenders:
        name = contender.subject.name
        instance, errors[name] = _open(contender, step, machine)
        calls[name] = _sequential(step, instance)
    warm, cold = (_times(clock(calls)) for clock in (in_turns, in_turns_cold))
    return RowFigures(row, warm.base_us, warm.with_lora_us, errors, cold)


def _times(us: Mapping[str, float]) -> Times:
    return Times(us[BASE], {name: time for name, time in us.items() if name != BASE})


def measure(
    candidate: Contender,
    baseline: Contender | None,
    rows: Sequence[DenseRow],
    machine: Machine,
    clock: Clock,
    progress: Callable[[str], None],
) -> Iterator[CallFigures]:
    """Time the delta alone, where a change of it shows best, and behind its base, with which it may
    overlap; and the base by itself. Raises WrongResult."""
    assert baseline is None, "run_dense times a baseline"
    for row in rows:
        step = _draw_step(row, machine)
        instance, _ = _open(candidate, step, machine)
        calls: dict[str, Callable[[], object]] = {
            BASE: step.base,
            "delta": partial(instance.apply, step.x, step.out),
            BEHIND_BASE: _sequential(step, instance),
        }
        yield CallFigures(row, clock(calls))


def _draw_step(row: DenseRow, machine: Machine) -> _Step:
    case, device = row.case, machine.device
    dtype = torch_dtype(case.dtype)
    torch.manual_seed(_SEED)
    x = torch.randn(case.tokens, case.in_features, device=device).to(dtype)
    weight = torch.randn(case.out_features, case.in_features, device=device)
    weight = (weight * case.in_features**-0.5).to(dtype)
    out = torch.empty(case.tokens, case.out_features, dtype=dtype, device=device)
    token_slots = torch.tensor(row.token_slots, dtype=torch.int32)

    def base() -> Tensor:
        return torch.mm(x, weight.T, out=out)

    return _Step(row, x, out, token_slots, base)


def _open(contender: Contender, step: _Step, machine: Machine) -> tuple[Instance, float]:
    """An instance that is prepared for the step, and the error of its result."""
    case, name = step.row.case, contender.subject.name
    # the same adapters for every subject: they depend on the seed and the case only
    pool = make_pool(case, _SEED, DataKind.SIGNED, machine, contender.have)
    instance = cast(Instance, contender.open(case, machine, pool))
    instance.prepare(step.token_slots)
    step.base()
    yardstick = Yardstick.of_step(case, pool, Batch(step.x, step.token_slots, step.out.clone()))
    return instance, yardstick.check(name, step.row.id, instance.apply(step.x, step.out))


def _sequential(step: _Step, instance: Instance) -> Callable[[], object]:
    def call() -> None:
        step.base()
        instance.apply(step.x, step.out)

    return call


def measure_steps(
    contender: Contender, machine: Machine, *, captured: bool
) -> Iterator[StepFigures]:
    """Time building the metadata of a step. `captured`: on the device as well; a subject that
    synchronises while it builds cannot be captured."""
    for tokens in TOKENS:
        case = replace(DenseRow("down", tokens, 16).case, slots=_STEP_SLOTS)
        instance = contender.subject.open(case, machine, None)
        for active in (count for count in _STEP_ACTIVE if count <= tokens):
            token_slots = _mapping(tokens, active)
            host_us, total_us = wall(partial(instance.prepare, token_slots))
            yield StepFigures(
                subject=contender.subject.name,
                tokens=tokens,
                slots=_STEP_SLOTS,
                active=active,
                host_us=host_us,
                total_us=total_us,
                device_us=_device_us(instance, token_slots, machine) if captured else None,
            )


def _device_us(instance: Resident, token_slots: Tensor, machine: Machine) -> float | None:
    resident = token_slots.to(machine.device)
    try:
        graph = graph_of(partial(instance.prepare, resident))
    except RuntimeError:
        return None
    return replay_in_turns({"prepare": graph})["prepare"]


def _mapping(tokens: int, active: int) -> Tensor:
    """int32 [tokens]: equal runs of `active` slots, or only base rows if none is active."""
    runs = [row * active // tokens if active else -1 for row in range(tokens)]
    return torch.tensor(runs, dtype=torch.int32)


def _line(figures: RowFigures) -> str:
    added = ", ".join(f"{name} +{figures.added_us(name):.1f}" for name in figures.with_lora_us)
    return f"{figures.row.id}: base {figures.base_us:.1f}, {added}"
