"""In which order the units of a mutant run: what probably kills it first. Pure.

The order decides how long a mutant takes, never whether it is killed.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from loragate.mutants.units import Kind, Unit

# of those that killed mutants nearby
_LIKELY = 6
# host tests below this time run before the cases: together they take seconds
_QUICK_S = 1.0


@dataclass(frozen=True, slots=True)
class Kill:
    """Of an earlier mutant: where it was planted, and the unit that failed first."""

    module: str
    function: str
    unit: str


def ordered(
    units: Sequence[Unit], module: str, function: str, kills: Iterable[Kill]
) -> tuple[Unit, ...]:
    """Units that killed mutants of the same function, then of the same module, then quick host
    tests, then the rest by its time."""
    weights: Counter[str] = Counter()
    for kill in kills:
        if kill.module == module:
            weights[kill.unit] += 100 if kill.function == function else 1
    known = [unit for unit in units if weights[unit.name]]
    likely = sorted(known, key=lambda u: (-weights[u.name] / (0.2 + u.seconds), u.name))[:_LIKELY]
    if likely:
        first = likely[0].kind
        # one session of pytest for all host tests among them
        likely.sort(key=lambda unit: unit.kind is not first)
    rest = sorted(set(units) - set(likely), key=lambda unit: (_rank(unit), unit.seconds, unit.name))
    return (*likely, *rest)


def quick(units: Sequence[Unit], seconds: float) -> tuple[tuple[Unit, ...], tuple[Unit, ...]]:
    """The first units, which together take at most so long on sound code, and the others."""
    ends = list(accumulate(unit.seconds for unit in units))
    number = bisect_right(ends, seconds)
    return tuple(units[:number]), tuple(units[number:])


def _rank(unit: Unit) -> int:
    if unit.kind is Kind.CASE:
        return 1
    return 0 if unit.seconds < _QUICK_S else 2
