"""Parts of a run for several machines: every case belongs to exactly one of them. Pure.

Invariant: the parts follow from the names of all cases and the recorded durations alone, so that
machines that are given the same find the same parts without asking each other.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from loragate.core.plural import counted
from loragate.matrix.patterns import SelectionError

_TEXT = re.compile(r"([0-9]{1,4})/([0-9]{1,4})")


@dataclass(frozen=True, slots=True)
class Durations:
    """What an earlier run took. `cases`: seconds of a case by its run id, 0 for one that was left
    out; `legs`: of the other legs of the gate, in seconds of cases that would take as long."""

    cases: Mapping[str, float] = field(default_factory=dict)
    legs: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """Part `index` of `count`, counted from 1. `of_gate`: the run has legs besides its cases, which
    are spread over the shards as well."""

    index: int
    count: int
    durations: Durations = Durations()
    of_gate: bool = False

    def parts(self, run_ids: Collection[str]) -> tuple[frozenset[str], ...]:
        """The run ids of each shard. Raises SelectionError where this one would have none."""
        recorded = self.durations.cases
        known = [recorded[name] for name in run_ids if name in recorded]
        # a case that is new takes as long as another one
        usual = median(known) if known else 1.0
        weights = {name: recorded.get(name, usual) for name in run_ids}
        parts = deal(weights, self.count, loads=self._loads)
        if not parts[self.index - 1]:
            raise SelectionError(
                f"shard {self} has no case: {counted(len(run_ids), 'case')} selected; "
                "use fewer shards"
            )
        return parts

    def part(self, run_ids: Collection[str]) -> frozenset[str]:
        """Those of `run_ids` that belong to this shard. Raises SelectionError for none."""
        return self.parts(run_ids)[self.index - 1]

    def leg_parts(self, legs: Sequence[str]) -> tuple[tuple[str, ...], ...]:
        """The legs of each shard, of those that do not run cases."""
        parts = self._recorded_legs
        new = [leg for leg in legs if leg not in self.durations.legs]
        return tuple(
            tuple(leg for leg in legs if leg in part or leg in new[number :: self.count])
            for number, part in enumerate(parts)
        )

    @property
    def _recorded_legs(self) -> tuple[frozenset[str], ...]:
        return deal(self.durations.legs, self.count)

    @property
    def _loads(self) -> tuple[float, ...]:
        """What the other legs of each shard take."""
        if not self.of_gate:
            return (0.0,) * self.count
        took = self.durations.legs
        return tuple(sum(took[leg] for leg in part) for part in self._recorded_legs)

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"


def deal(
    weights: Mapping[str, float], count: int, *, loads: Sequence[float] = ()
) -> tuple[frozenset[str], ...]:
    """`count` parts of about the same weight: the heaviest name first, each to the part that has
    least so far. `loads`: the weights that the parts begin with."""
    found: list[set[str]] = [set() for _ in range(count)]
    totals = [*(loads or [0.0] * count)]
    for name in sorted(weights, key=lambda name: (-weights[name], name)):
        # where all is known to take no time, numbers are even
        least = min(range(count), key=lambda part: (totals[part], len(found[part])))
        found[least].add(name)
        totals[least] += weights[name]
    return tuple(map(frozenset, found))


def shard_numbers(text: str) -> tuple[int, int]:
    """A type for an argument: 2/4 as (2, 4)."""
    parts = _TEXT.fullmatch(text)
    index, count = (int(part) for part in parts.groups()) if parts else (0, 0)
    if not 1 <= index <= count:
        allowed = "must be I/N with 1 <= I <= N, as in 2/4"
        raise argparse.ArgumentTypeError(f"{allowed} (got {text!r})")
    return index, count
