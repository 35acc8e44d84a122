"""Which failures of ordinary cases belong to a finding: of which cases, kind, size and place. Pure.

Invariant: what a pattern does not list it does not match. A metric with a limit that an oracle does
not report counts as beyond the limit.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from loragate.core.verdict import Failure, Judgement, OracleName
from loragate.findings.rate import Rate

# failures for which an oracle compares values or counts, and so reports how much is wrong
MEASURED = frozenset(
    {
        Failure.WRONG_ANSWER,
        Failure.BASE_ROW_CHANGED,
        Failure.NONDETERMINISTIC,
        Failure.NOT_EQUIVARIANT,
        Failure.STALE_STATE,
        Failure.REPLAY_DIFFERS,
        Failure.RACE,
    }
)


@dataclass(frozen=True, slots=True)
class Limit:
    """The largest value of one of the metrics that an oracle reports."""

    metric: str
    at_most: float

    def __str__(self) -> str:
        return f"{self.metric} at most {self.at_most:g}"


@dataclass(frozen=True, slots=True)
class Place:
    """Where the worst element lies, on one axis of `Judgement.where`."""

    axis: str
    value: int | str

    def __str__(self) -> str:
        return f"{self.axis} {self.value}"


@dataclass(frozen=True, slots=True)
class CasePattern:
    """Failing judgements of ordinary cases: a shell pattern on run ids, one oracle, the kinds
    of failure, and for those that are measured how large and where. One cause may have several
    kinds: the effect of an out-of-bounds read depends on what is in memory.

    Without `size` and `where` every size is listed, as in records of older runs. `seen`: in how
    many draws the finding shows; without it, in some draw of every run.
    """

    run: str
    oracle: OracleName
    failure: tuple[Failure, ...]
    size: tuple[Limit, ...] = ()
    where: tuple[Place, ...] = ()
    seen: Rate | None = None

    @property
    def extent(self) -> str:
        """How large and where, as text; "" if nothing is listed."""
        return ", ".join(map(str, (*self.size, *self.where)))

    def of(self, subject: str, other: str) -> CasePattern:
        """The same cases of another subject."""
        return replace(self, run=f"{other}{self.run.removeprefix(subject)}")

    def covers(self, run_id: str, judgement: Judgement) -> bool:
        return judgement.oracle is self.oracle and fnmatchcase(run_id, self.run)

    def shows(self, run_id: str, judgement: Judgement) -> bool:
        return self._has_kind(run_id, judgement) and not self._beyond(judgement)

    def excess(self, run_id: str, judgement: Judgement) -> str:
        """What a judgement of a listed kind has that is not listed; "" if it has nothing, or is
        of another kind."""
        return self._beyond(judgement) if self._has_kind(run_id, judgement) else ""

    def _has_kind(self, run_id: str, judgement: Judgement) -> bool:
        return self.covers(run_id, judgement) and judgement.failure in self.failure

    def _beyond(self, judgement: Judgement) -> str:
        if judgement.failure not in MEASURED:
            return ""
        return "; ".join((*self._too_large(judgement), *self._elsewhere(judgement)))

    def _too_large(self, judgement: Judgement) -> Iterator[str]:
        for limit in self.size:
            value = judgement.metrics.get(limit.metric)
            if value is None:
                yield f"{limit}, and it is not reported"
            # no comparison holds for NaN
            elif not value <= limit.at_most:
                yield f"{limit}, not {value:g}"

    def _elsewhere(self, judgement: Judgement) -> Iterator[str]:
        for place in self.where:
            value = judgement.where.get(place.axis)
            if value != place.value:
                yield f"{place}, not {'unknown' if value is None else value}"
