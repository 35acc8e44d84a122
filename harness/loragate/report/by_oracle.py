"""How many cases each oracle judged, by site of a subject. Pure; imports no torch.

A case passes where all of its oracles that apply pass. Without these figures a subject that stops
to promise something, or an oracle that no longer finds anything to look at, would stay green and
unseen.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from loragate.report.outcomes import CaseOutcome
from loragate.verdict import Judgement, OracleName, Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class OracleCount:
    """Cases of one site of one subject that name an oracle: it gave a verdict on `judged` of
    them and did not apply to `skipped`. `reason` is the one most often given for that."""

    subject: str
    site: str
    oracle: OracleName
    judged: int
    skipped: int
    reason: str = ""


def count_oracles(cases: Iterable[CaseOutcome]) -> tuple[OracleCount, ...]:
    """Sorted by subject and site, then in the order of the oracles. Of a case with several
    attempts the one that decided counts."""
    found: dict[tuple[str, str, OracleName], list[Judgement]] = defaultdict(list)
    for case in cases:
        for judgement in case.judgements:
            found[case.subject, case.site, judgement.oracle].append(judgement)
    order = list(OracleName)
    keys = sorted(found, key=lambda key: (key[0], key[1], order.index(key[2])))
    return tuple(_count(*key, found[key]) for key in keys)


def never_judged(counts: Iterable[OracleCount]) -> Iterable[OracleCount]:
    """Oracles that cases of a site name and that judged none of them."""
    return (count for count in counts if not count.judged)


def _count(
    subject: str, site: str, oracle: OracleName, judgements: Sequence[Judgement]
) -> OracleCount:
    reasons = Counter(j.message for j in judgements if j.verdict is Verdict.SKIP)
    skipped = reasons.total()
    return OracleCount(
        subject=subject,
        site=site,
        oracle=oracle,
        judged=len(judgements) - skipped,
        skipped=skipped,
        # the first by name among those given equally often, whatever the order of the events
        reason=min(reasons, key=lambda text: (-reasons[text], text), default=""),
    )
