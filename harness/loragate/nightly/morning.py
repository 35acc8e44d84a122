"""What a team wants to know in the morning, from the history alone. Pure.

Each page - terminal, HTML, summary of a CI step - shows what is prepared here.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime

from loragate.core.verdict import ExitCode
from loragate.history.model import JUDGED, Outcome, Purpose, ScanRun, TrialRecord
from loragate.nightly.environment import Change, changes
from loragate.nightly.origin import Origin, origin
from loragate.nightly.quarantine import Held, Quarantined, held
from loragate.nightly.replays import replay_of_trial
from loragate.nightly.states import GroupKey, GroupState, Status, group_key, states
from loragate.nightly.wave import Measure

_DAY_S = 86400.0
_BAD = (Status.WRONG, Status.FLAKY)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A path that is wrong, flaky, or undecided with something seen.

    is_new: it was first seen in the last run of its machine. is_held: all cases in which it shows
    are in quarantine. cause and explanation: "" where it was not diagnosed. replay: the command
    that shows it again.
    """

    state: GroupState
    origin: Origin | None
    is_new: bool
    is_held: bool
    cause: str
    explanation: str
    example: TrialRecord
    replay: str
    cases: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Night:
    """One run of a scan: all its planned trials, those that were not right, and their time."""

    run: ScanRun
    trials: int
    suspects: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Morning:
    """states: of all paths. undecided: those without a finding, the most expensive first. never:
    cases that were selected and that no oracle has ever judged."""

    findings: tuple[Finding, ...]
    states: tuple[GroupState, ...]
    undecided: tuple[GroupState, ...]
    changes: tuple[Change, ...]
    quarantine: tuple[Held, ...]
    nights: tuple[Night, ...]
    never: tuple[str, ...]
    # machines whose last run judged nothing
    idle: tuple[str, ...]
    # cases that failed in the last run of a machine because of the machine or the harness, and
    # that were judged in no trial of it
    stopped: tuple[str, ...]
    # machines with a run of a day to come: by their clock it is the last one until then
    ahead: tuple[str, ...]
    counts: Mapping[Status, int]
    trials: int
    infra: int

    @property
    def unexplained(self) -> tuple[Finding, ...]:
        """Something was seen there that does not decide anything yet; in quarantine only what was
        wrong."""
        return tuple(
            finding
            for finding in self.findings
            if finding.state.status is Status.UNDECIDED
            and not (finding.is_held and finding.example.outcome is not Outcome.WRONG)
        )

    @property
    def exit_code(self) -> ExitCode:
        """A flake in quarantine wakes nobody; a wrong answer is never excused."""
        for finding in self.findings:
            status = finding.state.status
            if status is Status.WRONG or (status is Status.FLAKY and not finding.is_held):
                return ExitCode.WRONG
        if self.unexplained or self.never or self.idle or self.stopped or not self.trials:
            return ExitCode.INCOMPLETE
        return ExitCode.OK


def morning(
    runs: Sequence[ScanRun],
    trials: Sequence[TrialRecord],
    quarantine: Sequence[Quarantined] = (),
    *,
    cases: Collection[str] = (),
    today: date,
) -> Morning:
    """trials: the oldest first. cases: those that should have been judged by now."""
    found = states(trials, runs)
    groups: dict[GroupKey, list[TrialRecord]] = defaultdict(list)
    for trial in trials:
        groups[group_key(trial)].append(trial)
    entries = held(quarantine, trials, runs, today)
    in_quarantine = {each.entry.case for each in entries if not each.released}
    latest = {run.machine: run.uid for run in sorted(runs, key=lambda run: run.started_at)}
    findings = tuple(
        _finding(state, groups[state.key], runs, in_quarantine, set(latest.values()))
        for state in found.values()
        if state.suspects and state.status is not Status.NOT_PROMISED
    )
    undecided = [s for s in found.values() if s.status is Status.UNDECIDED and not s.suspects]
    judged = [trial for trial in trials if trial.outcome in JUDGED]
    busy = {trial.run for trial in judged}
    return Morning(
        findings=tuple(sorted(findings, key=_urgency)),
        states=tuple(found.values()),
        undecided=tuple(sorted(undecided, key=lambda state: -state.missing * _each_s(state))),
        changes=changes(runs),
        quarantine=entries,
        nights=_nights(runs, trials, found.values()),
        never=tuple(sorted(set(cases) - {t.case for t in judged if t.measure == Measure.JUDGED})),
        idle=tuple(sorted(machine for machine, uid in latest.items() if uid not in busy)),
        stopped=_stopped(trials, set(latest.values())),
        ahead=tuple(sorted({run.machine for run in runs if run.started_at >= _end_of(today)})),
        counts=Counter(state.status for state in found.values()),
        trials=sum(trial.purpose is Purpose.PLANNED for trial in trials),
        infra=sum(trial.outcome is Outcome.INFRA for trial in trials),
    )


def _stopped(trials: Iterable[TrialRecord], latest: set[str]) -> tuple[str, ...]:
    of_case: dict[tuple[str, str], set[Outcome]] = defaultdict(set)
    for trial in trials:
        if trial.run in latest:
            of_case[trial.run, trial.case].add(trial.outcome)
    # what ended late under another clock is unknown, and no failure of the machine
    failed = [key for key, found in of_case.items() if Outcome.INFRA in found]
    return tuple(sorted({key[1] for key in failed if of_case[key].isdisjoint(JUDGED)}))


def _end_of(today: date) -> float:
    """Two days from its begin: another clock may be a little faster."""
    return datetime(today.year, today.month, today.day, tzinfo=UTC).timestamp() + 2 * _DAY_S


def cost_s(state: GroupState) -> float:
    """The time until an undecided path would be stable, if nothing else is seen."""
    return state.missing * _each_s(state)


def _each_s(state: GroupState) -> float:
    return state.seconds / max(1, state.trials)


def _urgency(finding: Finding) -> tuple[bool, int, bool, GroupKey]:
    order = (Status.WRONG, Status.FLAKY, Status.UNDECIDED, Status.STABLE)
    status = finding.state.status
    return finding.is_held, order.index(status), not finding.is_new, finding.state.key


def _finding(
    state: GroupState,
    trials: Sequence[TrialRecord],
    runs: Sequence[ScanRun],
    in_quarantine: Collection[str],
    latest: Collection[str],
) -> Finding:
    suspects = [trial for trial in state.suspects if not trial.cause]
    names = {(trial.run, trial.number) for trial in suspects}
    since = origin(trials, names, runs)
    diagnosis = state.diagnosis
    # a wrong answer says more than bits that differ
    wrong = [trial for trial in suspects if trial.outcome is Outcome.WRONG]
    example = diagnosis or (wrong or suspects)[-1]
    cases = tuple(sorted({trial.case for trial in suspects} or {example.case}))
    return Finding(
        state=state,
        origin=since,
        is_new=since is not None and since.bad.uid in latest,
        is_held=set(cases) <= set(in_quarantine),
        cause=diagnosis.cause if diagnosis else "",
        explanation=diagnosis.message if diagnosis else example.message,
        example=example,
        replay=diagnosis.replay if diagnosis else replay_of_trial(example),
        cases=cases,
    )


def _nights(
    runs: Iterable[ScanRun], trials: Iterable[TrialRecord], found: Iterable[GroupState]
) -> tuple[Night, ...]:
    suspects = {(t.run, t.number) for state in found for t in state.suspects if not t.cause}
    counts: dict[str, list[float]] = defaultdict(lambda: [0, 0, 0.0])
    for trial in trials:
        if trial.purpose is Purpose.PLANNED:
            count = counts[trial.run]
            count[0] += 1
            count[1] += (trial.run, trial.number) in suspects
            count[2] += trial.duration_s
    ordered = sorted(runs, key=lambda run: run.started_at)
    return tuple(
        Night(run, int(counts[run.uid][0]), int(counts[run.uid][1]), counts[run.uid][2])
        for run in ordered
        if run.uid in counts
    )


def day_of(seconds: float) -> str:
    """A time since 1970 as a date and time of day in UTC."""
    try:
        return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M}"
    except (OverflowError, ValueError, OSError):
        # beyond the years 1 to 9999, as an older version may have recorded it
        return f"{seconds:g} s since 1970"
