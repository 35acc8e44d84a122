"""What the figures of all benchmarks share: bars, means, the schema of a record. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from loragate.core.verdict import Verdict

# rate of a copy on an H200, bytes read + written
REFERENCE_BYTES_PER_S = 4.3e12


@dataclass(frozen=True, slots=True)
class Bar:
    """`measured` must not be above `target`; None if it could not be measured."""

    name: str
    target: float
    measured: float | None
    note: str = ""

    @property
    def verdict(self) -> Verdict:
        if self.measured is None:
            return Verdict.INCONCLUSIVE
        return Verdict.PASS if self.measured <= self.target else Verdict.FAIL


def refuse_newer(schema: object, known: int) -> None:
    """Raises ValueError for the schema of a record that a later version wrote."""
    if not isinstance(schema, int) or schema > known:
        raise ValueError(f"schema is {schema!r}, this version reads up to {known}")


def geometric_mean(ratios: Iterable[float | None]) -> float | None:
    known = _all_known(ratios)
    return math.exp(sum(map(math.log, known)) / len(known)) if known else None


def worst_of(figures: Iterable[float | None]) -> float | None:
    known = _all_known(figures)
    return max(known) if known else None


def _all_known(figures: Iterable[float | None]) -> list[float] | None:
    """None if there are none or one is missing: no bar is met by leaving a row out."""
    found = list(figures)
    known = [figure for figure in found if figure is not None]
    return known if found and len(known) == len(found) else None
