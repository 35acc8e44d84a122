"""The options of a replay under the conditions of a scan. No torch."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType

from loragate.core.arguments import count_from
from loragate.matrix.case import Case, Site
from loragate.matrix.case_run import CaseRun
from loragate.matrix.problems import nearest
from loragate.matrix.selection import select_one
from loragate.nightly.conditions import (
    PLAIN,
    Cache,
    Clock,
    Conditions,
    Memory,
    Schedule,
    conditions_of,
)
from loragate.nightly.wave import Measure
from loragate.subjects.registry import SUBJECTS

# as many trials as tell little of a rare flake, and take little time
_TIMES = 10
_MOST_NEIGHBOURS = 255
_FACTORS: Mapping[str, tuple[type[StrEnum], str]] = MappingProxyType(
    {
        "memory": (Memory, "what fresh memory holds"),
        "cache": (Cache, "compiled kernels on disk"),
        "clock": (Clock, "how fast the clocks of Python run for the subject"),
        "schedule": (Schedule, "how the work of streams is ordered"),
    }
)
# without a GPU there are no streams, and nothing is compiled
_ON_GPU_ONLY = ("cache", "schedule", "gpu")
_OPTIONS = (*_FACTORS, "neighbours", "gpu", "after", "measure", "times")


def add_condition_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "conditions of a scan",
        "With any of these the case runs in fresh processes, as in a scan, until a trial is wrong "
        "or unlike those before it. The page of a scan gives the options for what it found.",
    )
    _add_factors(group)
    group.add_argument(
        "--after",
        action="append",
        metavar="ID#DRAW",
        help="what each process runs before; repeatable, the first one first",
    )
    group.add_argument(
        "--measure",
        choices=[measure.value for measure in Measure],
        help=f"bits of the same inputs, or all oracles (default: {Measure.BITS}; of a whole model "
        f"{Measure.JUDGED})",
    )
    group.add_argument(
        "--times",
        type=count_from(1),
        metavar="N",
        help=f"processes, one after the other (default: {_TIMES})",
    )


def _add_factors(group: argparse._ArgumentGroup) -> None:
    for name, (kind, what) in _FACTORS.items():
        plain = getattr(PLAIN, name)
        choices = [value.value for value in kind]
        group.add_argument(f"--{name}", choices=choices, help=f"{what} (default: {plain})")
    group.add_argument(
        "--neighbours",
        type=count_from(0, _MOST_NEIGHBOURS),
        metavar="N",
        help="other processes that run the same meanwhile (default: 0)",
    )
    group.add_argument("--gpu", metavar="GPU", help="as in CUDA_VISIBLE_DEVICES")


def given_conditions(arguments: argparse.Namespace) -> tuple[str, ...]:
    """The names of those options that were given."""
    return tuple(name for name in _OPTIONS if getattr(arguments, name) is not None)


def conditions_from(arguments: argparse.Namespace, gpus: Sequence[str]) -> Conditions:
    """gpus: those that are visible; the first one is used where none is named. Raises ValueError
    for what cannot be varied on this machine."""
    factors = (*_FACTORS, "neighbours", "gpu")
    given = {
        name: str(value) for name in factors if (value := getattr(arguments, name)) is not None
    }
    if not gpus:
        for name in _ON_GPU_ONLY:
            if given.get(name, getattr(PLAIN, name)) != getattr(PLAIN, name):
                raise ValueError(f"--{name} {given[name]} needs a GPU, and none is visible")
        return conditions_of(given)
    gpu = given.setdefault("gpu", gpus[0])
    if gpu not in gpus:
        near = nearest(gpu, gpus)
        hint = f"; did you mean {near}?" if near else ""
        raise ValueError(f"--gpu {gpu!r}: visible are {', '.join(gpus)}{hint}")
    return conditions_of(given)


def runs_before(
    arguments: argparse.Namespace, cases: Sequence[Case], matrix: tuple[Path, ...]
) -> list[CaseRun]:
    """What --after names. Raises ValueError."""
    named = arguments.after or ()
    return [select_one(text, cases, subjects=SUBJECTS, matrix=matrix) for text in named]


def measure_from(arguments: argparse.Namespace, runs: Iterable[CaseRun]) -> Measure:
    """Raises ValueError for bits of a case that has none."""
    engine = next((run for run in runs if run.case.site is Site.ENGINE), None)
    if engine is not None and arguments.measure == Measure.BITS:
        allowed = f"--measure {Measure.JUDGED}"
        raise ValueError(f"{engine.run_id} is judged by its oracles alone: use {allowed}")
    return Measure(arguments.measure or (Measure.JUDGED if engine else Measure.BITS))


def times_from(arguments: argparse.Namespace) -> int:
    return int(arguments.times or _TIMES)
