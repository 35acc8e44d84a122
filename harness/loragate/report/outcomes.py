"""The outcome of every case, leg and kernel, derived from events alone. Pure; imports no torch.

Invariants: the result does not depend on the order of the events, and no event can improve a
verdict that another event has worsened.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from loragate.core.verdict import Failure, Judgement, Verdict, worst
from loragate.events.model import (
    CaseFinished,
    CaseStarted,
    CompileResult,
    Event,
    Expected,
    KnownFinding,
    LegFinished,
    LegStarted,
    RunFinished,
    RunStarted,
)
from loragate.findings.ledger import Finding
from loragate.matrix.case_run import trial_name
from loragate.matrix.plan import trials
from loragate.matrix.replay_command import replay_command
from loragate.report.known import HARMLESS, excused, known_in, listed_findings, standing

_Item = TypeVar("_Item")

# a case with one of these was judged; with any other its result is still missing
JUDGED = frozenset({Verdict.PASS, Verdict.FAIL, Verdict.INCONCLUSIVE})

# for a case that was started without being planned
_UNPLANNED = Expected(leg="", subject="unplanned", site="", count=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseOutcome:
    """One case of one subject over all its draws and repeats; `shown` is the trial that decided.

    `shown` is None if no trial came to its end. `trials` counts those that were started, and
    `bad_trials` are the draw and repeat of those that did not pass. `known` are the listed findings
    that the case shows; with nothing else against it the case counts as passed.
    """

    run_id: str
    subject: str
    site: str
    verdict: Verdict
    failure: Failure | None = None
    message: str = ""
    trials: int = 1
    bad_trials: tuple[tuple[int, int], ...] = ()
    shown: CaseFinished | None = None
    # the trial that was started last, where `shown` is None
    started: CaseStarted | None = None
    known: tuple[Finding, ...] = ()

    @property
    def is_known(self) -> bool:
        """Whether the case failed as listed, and in no other way."""
        return bool(self.known) and self.verdict is Verdict.PASS

    @property
    def judgements(self) -> tuple[Judgement, ...]:
        return self.shown.judgements if self.shown else ()

    @property
    def evidence(self) -> tuple[Judgement, ...]:
        """The judgements that did not pass."""
        return tuple(j for j in self.judgements if j.verdict not in HARMLESS)

    @property
    def replay(self) -> str:
        if self.shown:
            return self.shown.replay
        if self.started and self.started.replay:
            return self.started.replay
        return replay_command(self.run_id, *(self.started.trial if self.started else (0, 0)))


@dataclass(frozen=True, slots=True, kw_only=True)
class LegOutcome:
    name: str
    verdict: Verdict
    message: str = ""
    finished: LegFinished | None = None


def case_outcomes(events: Iterable[Event]) -> tuple[CaseOutcome, ...]:
    """Outcomes of all cases that were started or finished, sorted by run id."""
    events = tuple(events)
    ends: dict[str, list[CaseFinished]] = defaultdict(list)
    starts: dict[str, list[CaseStarted]] = defaultdict(list)
    for event in events:
        if isinstance(event, CaseFinished):
            ends[event.run_id].append(event)
        elif isinstance(event, CaseStarted):
            starts[event.run_id].append(event)
    owners = _owners(events)
    plans = [event for event in events if isinstance(event, RunStarted)]
    legs = {leg.name: leg.verdict for leg in leg_outcomes(events)}
    listed = listed_findings(events)
    outcomes = []
    for run_id in sorted(ends.keys() | starts.keys()):
        owner = owners.get(run_id, _UNPLANNED)
        leg = legs.get(owner.leg, Verdict.INFRA)
        case = _case(starts[run_id], ends[run_id], owner, leg, listed)
        missing = _planned(plans, run_id) - _trials(starts[run_id], ends[run_id])
        outcomes.append(_with_missing_trials(case, missing))
    return tuple(outcomes)


def leg_outcomes(events: Iterable[Event]) -> tuple[LegOutcome, ...]:
    """All planned legs in plan order, then those that were not planned."""
    events = tuple(events)
    planned = [leg for event in events if isinstance(event, RunStarted) for leg in event.legs]
    started = {event.name for event in events if isinstance(event, LegStarted)}
    ended: dict[str, list[LegFinished]] = defaultdict(list)
    for event in events:
        if isinstance(event, LegFinished):
            ended[event.name].append(event)
    run_ended = any(isinstance(event, RunFinished) for event in events)
    names = dict.fromkeys([*planned, *sorted(started | ended.keys())])
    return tuple(_leg(name, ended[name], name in started, run_ended) for name in names)


def compile_outcomes(events: Iterable[Event]) -> tuple[CompileResult, ...]:
    """The worst result for every (subject, kernel, specialisation, arch)."""
    groups: dict[tuple[str, ...], list[CompileResult]] = defaultdict(list)
    for event in events:
        if isinstance(event, CompileResult):
            key = (event.subject, event.kernel, event.specialisation, event.arch)
            groups[key].append(event)
    return tuple(
        _first_worst(sorted(groups[key], key=repr), lambda result: result.verdict)
        for key in sorted(groups)
    )


def _case(
    starts: list[CaseStarted],
    ends: list[CaseFinished],
    owner: Expected,
    leg: Verdict,
    listed: Sequence[KnownFinding],
) -> CaseOutcome:
    finished = {end.trial for end in ends}
    lost = [start for start in starts if start.trial not in finished]
    outcomes = [_judged(ends, listed)] if ends else []
    if lost:
        last = max(lost, key=lambda start: (start.trial, start.worker))
        outcomes.append(_crashed(last, owner, leg))
    shown = _first_worst(outcomes, lambda outcome: outcome.verdict)
    bad = {end.trial for end in ends if standing(excused(end, listed)) is not Verdict.PASS}
    bad |= {start.trial for start in lost}
    return replace(shown, trials=len(_trials(starts, ends)), bad_trials=tuple(sorted(bad)))


def _planned(plans: Iterable[RunStarted], run_id: str) -> frozenset[tuple[int, int]]:
    return frozenset(
        trial
        for plan in plans
        for trial in trials(plan.draws, plan.repeats, once=run_id in plan.once)
    )


def _trials(
    starts: Iterable[CaseStarted], ends: Iterable[CaseFinished]
) -> frozenset[tuple[int, int]]:
    return frozenset({start.trial for start in starts} | {end.trial for end in ends})


def _with_missing_trials(case: CaseOutcome, missing: frozenset[tuple[int, int]]) -> CaseOutcome:
    if not missing or case.verdict is not Verdict.PASS:
        return case
    names = ", ".join(trial_name(*trial) for trial in sorted(missing))
    rest = "failed as listed" if case.is_known else "passed"
    return replace(
        case, verdict=Verdict.INCONCLUSIVE, message=f"{rest}, but never started: {names}"
    )


def _judged(ends: list[CaseFinished], listed: Sequence[KnownFinding]) -> CaseOutcome:
    # among trials of the same verdict, one that shows a finding is the more informative
    order = sorted(ends, key=lambda end: (not known_in(end, listed), end.trial, repr(end)))
    shown = _first_worst(order, lambda end: standing(excused(end, listed)))
    rest = excused(shown, listed)
    verdict = standing(rest)
    decisive = next((j for j in rest.judgements if j.verdict is verdict), None)
    failure = shown.failure or (decisive.failure if decisive else None)
    message = shown.message or (decisive.message if decisive else "")
    if verdict is Verdict.INCONCLUSIVE and not message:
        message = "no oracle gave a verdict"
    return CaseOutcome(
        run_id=shown.run_id,
        subject=shown.subject,
        site=shown.site,
        verdict=verdict,
        failure=failure,
        message=message,
        shown=shown,
        known=known_in(shown, listed),
    )


def _crashed(lost: CaseStarted, owner: Expected, leg: Verdict) -> CaseOutcome:
    # if the leg went on without the worker, the case killed it; if the whole leg was lost, the
    # case may have had nothing to do with it
    alone = leg is not Verdict.INFRA and leg is not Verdict.INCONCLUSIVE
    what = "crashed" if alone else "was lost together with its leg"
    return CaseOutcome(
        run_id=lost.run_id,
        subject=owner.subject,
        site=owner.site,
        verdict=Verdict.FAIL if alone else Verdict.INFRA,
        failure=Failure.CRASH,
        message=f"worker {lost.worker} {what} while it ran {trial_name(*lost.trial)}",
        started=lost,
    )


def _leg(name: str, ends: list[LegFinished], started: bool, run_ended: bool) -> LegOutcome:
    if not ends:
        # a leg that vanished from a run that went on is broken; a killed run shows nothing
        verdict = Verdict.INFRA if started and run_ended else Verdict.INCONCLUSIVE
        message = "started and never finished" if started else "did not run"
        return LegOutcome(name=name, verdict=verdict, message=message)
    end = _first_worst(sorted(ends, key=repr), _leg_standing)
    verdict = _leg_standing(end)
    message = end.message
    if verdict is not end.verdict and not message:
        message = f"exit code {end.exit_code} with verdict {end.verdict}"
    return LegOutcome(name=name, verdict=verdict, message=message, finished=end)


def _leg_standing(end: LegFinished) -> Verdict:
    contradicts = end.exit_code != 0 and end.verdict in HARMLESS
    return Verdict.INFRA if contradicts else end.verdict


def _owners(events: Iterable[Event]) -> Mapping[str, Expected]:
    """The row of expected results that each planned run id belongs to."""
    return {
        run_id: expected
        for event in events
        if isinstance(event, RunStarted)
        for expected in event.expected
        for run_id in expected.run_ids
    }


def _first_worst(items: Sequence[_Item], verdict_of: Callable[[_Item], Verdict]) -> _Item:
    bad = worst(verdict_of(item) for item in items)
    return next(item for item in items if verdict_of(item) is bad)
