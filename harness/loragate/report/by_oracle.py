"""How many cases each oracle judged, by site of a subject. Pure; imports no torch.

A case passes if all of its oracles that apply pass. These figures do not enter the verdict; they
show when a subject no longer promises something, or when an oracle finds nothing to judge.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from loragate.core.verdict import Judgement, OracleName, Verdict
from loragate.report.outcomes import JUDGED, CaseOutcome


@dataclass(frozen=True, slots=True, kw_only=True)
class OracleCount:
    """What one oracle did with the cases of one site of one subject.

    It gave a verdict on `judged` cases and did not apply to `skipped` ones; cases that the machine
    cut short are in neither. `reason` is the one most often given for a skip.
    """

    subject: str
    site: str
    oracle: OracleName
    judged: int
    skipped: int
    reason: str = ""

    def __str__(self) -> str:
        named = self.judged + self.skipped
        return f"{self.judged} of {named}" if self.skipped else str(self.judged)


@dataclass(frozen=True, slots=True)
class OracleRow:
    """A site of a subject; one cell for each oracle of the table, None if no case names it."""

    subject: str
    site: str
    cells: tuple[OracleCount | None, ...]


@dataclass(frozen=True, slots=True)
class OracleTable:
    oracles: tuple[OracleName, ...]
    rows: tuple[OracleRow, ...]


def oracle_table(counts: Iterable[OracleCount]) -> OracleTable:
    """One row for each site of a subject, in the order of `counts`."""
    sites: dict[tuple[str, str], dict[OracleName, OracleCount]] = defaultdict(dict)
    for count in counts:
        sites[count.subject, count.site][count.oracle] = count
    oracles = tuple(name for name in OracleName if any(name in site for site in sites.values()))
    rows = (OracleRow(*key, tuple(map(site.get, oracles))) for key, site in sites.items())
    return OracleTable(oracles, tuple(rows))


def count_oracles(cases: Iterable[CaseOutcome]) -> tuple[OracleCount, ...]:
    """Sorted by subject and site, then in the order of the oracles. Of a case with several trials
    the one that decided counts."""
    found: dict[tuple[str, str, OracleName], list[Judgement]] = defaultdict(list)
    for case in cases:
        for judgement in case.judgements:
            found[case.subject, case.site, judgement.oracle].append(judgement)
    order = list(OracleName)
    keys = sorted(found, key=lambda key: (key[0], key[1], order.index(key[2])))
    return tuple(_count(*key, found[key]) for key in keys)


def never_judged(counts: Iterable[OracleCount]) -> Iterable[OracleCount]:
    """Oracles that applied to no case of a site that names them."""
    return (count for count in counts if count.skipped and not count.judged)


def _count(
    subject: str, site: str, oracle: OracleName, judgements: Sequence[Judgement]
) -> OracleCount:
    reasons = Counter(j.message for j in judgements if j.verdict is Verdict.SKIP)
    return OracleCount(
        subject=subject,
        site=site,
        oracle=oracle,
        judged=sum(judgement.verdict in JUDGED for judgement in judgements),
        skipped=reasons.total(),
        # the first by name among those given equally often, whatever the order of the events
        reason=min(reasons, key=lambda text: (-reasons[text], text), default=""),
    )
