"""Cases that did not pass, grouped by what they have in common: one defect often shows in many
cases. Pure.

Invariant: every case is in exactly one kind, and a large kind does not hide a small one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from loragate.core.verdict import Failure, OracleName, Verdict
from loragate.report.outcomes import CaseOutcome


@dataclass(frozen=True, slots=True)
class Kind:
    """`oracles` are those that did not pass each of the `cases`; none if the cases ended before an
    oracle gave a verdict."""

    subject: str
    site: str
    verdict: Verdict
    failure: Failure | None
    oracles: tuple[OracleName, ...]
    cases: tuple[CaseOutcome, ...]


def kinds_of_trouble(troubles: Iterable[CaseOutcome]) -> tuple[Kind, ...]:
    """In the order of their first cases; cases keep their order."""
    groups: dict[
        tuple[str, str, Verdict, Failure | None, tuple[OracleName, ...]], list[CaseOutcome]
    ] = defaultdict(list)
    for case in troubles:
        against = {judgement.oracle for judgement in case.evidence}
        oracles = tuple(oracle for oracle in OracleName if oracle in against)
        groups[case.subject, case.site, case.verdict, case.failure, oracles].append(case)
    return tuple(Kind(*key, tuple(cases)) for key, cases in groups.items())
