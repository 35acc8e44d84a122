"""Known findings: what is listed, what was observed, and the verdict. Pure; no torch.

Invariant: the ledger is strict. An entry whose version range covers the installed version must
reproduce wherever it can run; an entry that no longer reproduces fails, so that no finding outlives
its defect and no known defect hides a new one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from fnmatch import fnmatchcase

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from loragate.core.verdict import Failure, Judgement, Verdict, worst
from loragate.findings.pattern import CasePattern
from loragate.findings.rate import gone


class Kind(StrEnum):
    # a wrong result for an input that nothing forbids
    DEFECT = "defect"
    # correct as long as every caller knows of it
    HAZARD = "hazard"


class Needs(StrEnum):
    """What a probe needs to show its finding."""

    ANY = "any"
    CUDA = "cuda"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One entry; `versions` is a specifier such as ">=0.26,<0.27", and `evidence` is what was
    observed on `seen_on`.

    `probe` reproduces it, or without one `case`. `case` says which failures of the matrix it
    excuses. `also`: subjects that contain what the finding is about, and fail the same cases."""

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
    also: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        assert self.probe or self.case, f"{self.id}: neither probe nor case"

    @property
    def subjects(self) -> tuple[str, ...]:
        """All that show it."""
        return (self.subject, *self.also)

    def of(self, subject: str) -> Finding:
        """The same entry about one of `subjects`, whose cases alone must reproduce it. The versions
        are still those of the package that the finding is about."""
        assert subject in self.subjects, f"{self.id} is not about {subject}"
        case = self.case and self.case.of(self.subject, subject)
        return replace(self, subject=subject, also=(), case=case)

    def loses_device(self, run_id: str) -> bool:
        """Whether it lists that the device no longer answers after a case."""
        cases = (self.of(subject).case for subject in self.subjects)
        return any(
            Failure.CUDA_STICKY in case.failure and fnmatchcase(run_id, case.run)
            for case in cases
            if case is not None
        )

    def covers(self, version: str) -> bool:
        """Whether `version` is in the range; a version that cannot be parsed is not."""
        try:
            parsed = Version(version)
        except InvalidVersion:
            return False
        return SpecifierSet(self.versions, prereleases=True).contains(parsed)


def any_loses_device(findings: Iterable[Finding], run_id: str) -> bool:
    """Whether one of them lists that the device no longer answers after a case. Such a case is run
    with one draw, alone: the worker ends with it, and the listed loss hides what else would show.
    """
    return any(finding.loses_device(run_id) for finding in findings)


class Seen(StrEnum):
    REPRODUCED = "reproduced"
    ABSENT = "absent"
    # it did not show, which does not mean that it is gone
    UNSEEN = "not seen"
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
    UNSEEN = "not seen"
    # the installed version is not in the range of the entry
    OUT_OF_RANGE = "out of range"
    NOT_TRIED = "not run here"
    BROKEN = "broken"


VERDICTS: Mapping[State, Verdict] = {
    State.KNOWN: Verdict.PASS,
    State.STALE: Verdict.FAIL,
    # nothing is known to be wrong with the entry, and nothing was shown either
    State.UNSEEN: Verdict.SKIP,
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
        Seen.UNSEEN: State.UNSEEN,
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
    for finding, case in _about(findings, version, judgement):
        if case.shows(run_id, judgement):
            return finding
    return None


def exceeded_finding(
    findings: Iterable[Finding], version: str, run_id: str, judgement: Judgement
) -> tuple[Finding, str] | None:
    """The first entry that lists a failing judgement apart from its size or place, and what the
    entry lists instead."""
    for finding, case in _about(findings, version, judgement):
        excess = case.excess(run_id, judgement)
        if excess:
            return finding, excess
    return None


def _about(
    findings: Iterable[Finding], version: str, judgement: Judgement
) -> Iterator[tuple[Finding, CasePattern]]:
    if judgement.verdict is not Verdict.FAIL:
        return
    for finding in findings:
        if finding.case is not None and finding.covers(version):
            yield finding, finding.case


@dataclass(frozen=True, slots=True)
class Judged:
    """A judgement of one draw of a case."""

    run_id: str
    draw: int
    judgement: Judgement


def observe_cases(findings: Iterable[Finding], judged: Sequence[Judged]) -> dict[str, Observation]:
    """What the judgements of a run say about the entries that name cases."""
    return {
        finding.id: _observe_case(finding, finding.case, judged)
        for finding in findings
        if finding.case is not None
    }


def _observe_case(finding: Finding, case: CasePattern, judged: Sequence[Judged]) -> Observation:
    # repeats of a draw have the same data, and are one observation
    draws: dict[tuple[str, int], bool] = {}
    for one in judged:
        shown = case.shows(one.run_id, one.judgement)
        held = case.covers(one.run_id, one.judgement) and one.judgement.verdict is Verdict.PASS
        # a failure of another kind is reported by its case, and may hide this one
        if shown or held:
            key = (one.run_id, one.draw)
            draws[key] = draws.get(key, False) or shown
    showing = sum(draws.values())
    if showing:
        first = next(run_id for (run_id, _), shown in draws.items() if shown)
        return Observation(Seen.REPRODUCED, f"{showing} of {len(draws)} draws, first {first}")
    if not draws:
        return Observation(Seen.NOT_TRIED, f"no case like {case.run} was judged by {case.oracle}")
    return _not_shown(finding, case, len(draws))


def _not_shown(finding: Finding, case: CasePattern, draws: int) -> Observation:
    text = f"none of {draws} draws shows it"
    if finding.probe is not None:
        return Observation(Seen.UNSEEN, f"{text}; probe {finding.probe} decides")
    if case.seen is None:
        return Observation(Seen.ABSENT, text)
    if gone(case.seen, draws):
        return Observation(Seen.ABSENT, f"{text}, which {case.seen} exclude")
    return Observation(Seen.UNSEEN, f"{text}, which {case.seen} allow")
