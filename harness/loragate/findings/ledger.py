"""Known findings: what is listed, what was observed, and the verdict. Pure; no torch.

Invariant: the ledger is strict. An entry whose version range covers the installed version must
reproduce wherever it can run; an entry that no longer reproduces fails, so that no finding outlives
its defect and no known defect hides a new one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from fnmatch import fnmatchcase

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from loragate.core.verdict import Failure, Judgement, OracleName, Verdict, worst


class Kind(StrEnum):
    # a wrong result for an input that nothing forbids
    DEFECT = "defect"
    # correct as long as every caller knows of it
    HAZARD = "hazard"


class Needs(StrEnum):
    """What a probe needs to show its finding."""

    ANY = "any"
    CUDA = "cuda"


@dataclass(frozen=True, slots=True)
class CasePattern:
    """Failing judgements of ordinary cases: a shell pattern on run ids, one oracle, and the kinds
    of failure. One cause may have several: the effect of an out-of-bounds read depends on what is
    in memory."""

    run: str
    oracle: OracleName
    failure: tuple[Failure, ...]

    def covers(self, run_id: str, judgement: Judgement) -> bool:
        return judgement.oracle is self.oracle and fnmatchcase(run_id, self.run)

    def shows(self, run_id: str, judgement: Judgement) -> bool:
        return self.covers(run_id, judgement) and judgement.failure in self.failure


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One entry. Exactly one of `probe` and `case` reproduces it; `versions` is a specifier
    such as ">=0.26,<0.27"; `evidence` is what was observed on `seen_on`."""

    id: str
    subject: str
    versions: str
    kind: Kind
    title: str
    statement: str
    evidence: str
    seen_on: str
    upstream: tuple[str, ...] = ()
    probe: str | None = None
    case: CasePattern | None = None

    def __post_init__(self) -> None:
        assert (self.probe is None) != (self.case is None), f"{self.id}: one of probe and case"

    def covers(self, version: str) -> bool:
        """Whether `version` is in the range; a version that cannot be parsed is not."""
        try:
            parsed = Version(version)
        except InvalidVersion:
            return False
        return SpecifierSet(self.versions, prereleases=True).contains(parsed)


class Seen(StrEnum):
    REPRODUCED = "reproduced"
    ABSENT = "absent"
    # it cannot be tried on this machine
    NOT_TRIED = "not tried"
    # the attempt itself failed
    BROKEN = "broken"


@dataclass(frozen=True, slots=True)
class Observation:
    seen: Seen
    # evidence if reproduced or absent, else the reason
    text: str


class State(StrEnum):
    KNOWN = "known"
    STALE = "stale"
    # the installed version is not in the range of the entry
    OUT_OF_RANGE = "out of range"
    NOT_TRIED = "not run here"
    BROKEN = "broken"


VERDICTS: Mapping[State, Verdict] = {
    State.KNOWN: Verdict.PASS,
    State.STALE: Verdict.FAIL,
    # the entry is not about this version
    State.OUT_OF_RANGE: Verdict.SKIP,
    State.NOT_TRIED: Verdict.SKIP,
    State.BROKEN: Verdict.INFRA,
}


@dataclass(frozen=True, slots=True)
class Line:
    """One entry and its state in this run."""

    finding: Finding
    state: State
    observation: Observation


def audit(
    findings: Iterable[Finding], version: str, observed: Mapping[str, Observation]
) -> tuple[Line, ...]:
    """Compare the ledger with what was observed; `observed` is by finding id."""
    return tuple(
        Line(finding, _state(finding, version, observed[finding.id].seen), observed[finding.id])
        for finding in findings
    )


def _state(finding: Finding, version: str, seen: Seen) -> State:
    if not finding.covers(version):
        return State.OUT_OF_RANGE
    return {
        Seen.REPRODUCED: State.KNOWN,
        Seen.ABSENT: State.STALE,
        Seen.NOT_TRIED: State.NOT_TRIED,
        Seen.BROKEN: State.BROKEN,
    }[seen]


def verdict_of(lines: Sequence[Line]) -> Verdict:
    """PASS if everything that could be tried reproduced; SKIP if nothing could be tried."""
    verdicts = [VERDICTS[line.state] for line in lines]
    tried = [verdict for verdict in verdicts if verdict is not Verdict.SKIP]
    return worst(tried) if tried else Verdict.SKIP


def known_finding(
    findings: Iterable[Finding], version: str, run_id: str, judgement: Judgement
) -> Finding | None:
    """The entry that a failing judgement belongs to; it is then reported as known."""
    if judgement.verdict is not Verdict.FAIL:
        return None
    return next(
        (
            finding
            for finding in findings
            if finding.case is not None
            and finding.covers(version)
            and finding.case.shows(run_id, judgement)
        ),
        None,
    )


def observe_cases(
    findings: Iterable[Finding], judged: Sequence[tuple[str, Judgement]]
) -> dict[str, Observation]:
    """What the judgements of a run, by run id, say about the entries that name cases."""
    return {
        finding.id: _observe_case(finding.case, judged)
        for finding in findings
        if finding.case is not None
    }


def _observe_case(case: CasePattern, judged: Sequence[tuple[str, Judgement]]) -> Observation:
    tried = [
        (run_id, judgement)
        for run_id, judgement in judged
        # a failure of another kind is reported by its case, and may hide this one
        if case.shows(run_id, judgement)
        or (case.covers(run_id, judgement) and judgement.verdict is Verdict.PASS)
    ]
    shown = [run_id for run_id, judgement in tried if case.shows(run_id, judgement)]
    if shown:
        return Observation(Seen.REPRODUCED, f"{len(shown)} of {len(tried)} cases, first {shown[0]}")
    if tried:
        return Observation(Seen.ABSENT, f"none of {len(tried)} cases shows it")
    return Observation(Seen.NOT_TRIED, f"no case like {case.run} was judged by {case.oracle}")
