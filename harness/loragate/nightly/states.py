"""Stable, flaky, wrong or undecided: what the trials of each (path, group, device) say together.

Trials of a case count as long as a machine runs the same source. Same inputs must give the same
bits wherever the code and the environment are the same: the digest that most trials of a case and
draw have is the reference, and every other one differs. A wrong answer is never called flaky:
seen again with the same inputs it is wrong, otherwise it stays undecided. Pure.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from loragate.core.sequential import Decision, Interval, SequentialTest, anytime_interval
from loragate.history.model import Outcome, Purpose, ScanRun, TrialRecord
from loragate.nightly.conditions import Cause
from loragate.nightly.environment import environment_key
from loragate.nightly.sources import Source, Sources

# a path that differs in 5 % of all trials is flaky, one in 0.5 % may be called stable
TEST = SequentialTest(healthy=0.005, defective=0.05, error=0.01)


class Status(StrEnum):
    WRONG = "wrong"
    FLAKY = "flaky"
    UNDECIDED = "undecided"
    STABLE = "stable"
    # the subject does not promise equal bits
    NOT_PROMISED = "not promised"


class Scope(StrEnum):
    """Where equal inputs gave other bits."""

    PROCESS = "within a process"
    PROCESSES = "across processes"
    GPUS = "across GPUs"


@dataclass(frozen=True, slots=True, order=True)
class GroupKey:
    path: str
    grouped: str
    device: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupState:
    """`failures` of `trials` planned ones differed, at a rate within `bound`.

    bits: how many trials compared bits; scopes: where they differed. suspects: all trials since the
    change that differed or were wrong, the oldest first. diagnosis: the record of the last one.
    infra: trials in which the machine failed.
    """

    key: GroupKey
    path_key: str
    status: Status
    trials: int
    failures: int
    bound: Interval
    bits: int
    scopes: frozenset[Scope]
    suspects: tuple[TrialRecord, ...]
    diagnosis: TrialRecord | None
    infra: int
    seconds: float
    last: float

    @property
    def missing(self) -> int:
        """Clean trials that would make an undecided path stable; 0 for others."""
        if self.status is not Status.UNDECIDED:
            return 0
        return max(0, TEST.clean_trials() - self.trials)


def group_key(trial: TrialRecord) -> GroupKey:
    return GroupKey(trial.path, trial.grouped, trial.device)


def states(trials: Iterable[TrialRecord], runs: Iterable[ScanRun]) -> dict[GroupKey, GroupState]:
    """The state of each group with trials that count, by its key; `trials` the oldest first."""
    runs = tuple(runs)
    environments = {run.uid: environment_key(run.environment) for run in runs}
    groups: dict[GroupKey, list[Sequence[TrialRecord]]] = defaultdict(list)
    for (key, _), found in _by_source(trials, runs).items():
        groups[key].append(found)
    return {key: _state(key, found, environments) for key, found in sorted(groups.items())}


def _by_source(
    trials: Iterable[TrialRecord], runs: Iterable[ScanRun]
) -> dict[tuple[GroupKey, Source], list[TrialRecord]]:
    """The trials that count. A change of its source may also change the group of a case."""
    sources: Sources[TrialRecord] = Sources(runs)
    kept: dict[Source, list[TrialRecord]] = defaultdict(list)
    for trial in trials:
        ended = sources.ended_by(trial)
        for source in ended.sources:
            kept.pop(source, None)
        for each in (*ended.again, trial):
            kept[sources.of(each)].append(each)
    found: dict[tuple[GroupKey, Source], list[TrialRecord]] = defaultdict(list)
    for source, of_source in kept.items():
        for trial in of_source:
            found[group_key(trial), source].append(trial)
    return found


def _state(
    key: GroupKey, sources: Sequence[Sequence[TrialRecord]], environments: Mapping[str, str]
) -> GroupState:
    """sources: the trials of each."""
    differing: dict[tuple[str, int], Scope] = {}
    for of_source in sources:
        differing |= differing_trials(of_source, environments)
    trials = sorted((t for found in sources for t in found), key=lambda t: (t.at, *_name(t)))
    planned = [trial for trial in trials if trial.purpose is Purpose.PLANNED]
    counted = [t for t in planned if t.outcome in (Outcome.RIGHT, Outcome.DIFFERENT)]
    failures = sum(_name(trial) in differing for trial in counted)
    wrong = [t for t in trials if t.outcome is Outcome.WRONG and not t.cause]
    suspects = [t for t in trials if t.outcome is Outcome.WRONG or _name(t) in differing]
    diagnoses = [trial for trial in trials if trial.cause]
    return GroupState(
        key=key,
        path_key=trials[-1].path_key,
        status=status_of(
            Evidence(
                trials=len(counted),
                failures=failures,
                is_wrong=bool(wrong),
                is_confirmed=is_confirmed(wrong),
                is_promised=all(of_source[-1].promised for of_source in sources),
                is_explained=any(t.cause not in ("", Cause.UNKNOWN) for t in trials),
            )
        ),
        trials=len(counted),
        failures=failures,
        bound=anytime_interval(failures, len(counted)),
        bits=sum(trial.measure == "bits" for trial in counted),
        scopes=frozenset(differing.values()),
        suspects=tuple(suspects),
        diagnosis=diagnoses[-1] if diagnoses else None,
        infra=sum(trial.outcome is Outcome.INFRA for trial in trials),
        seconds=sum(trial.duration_s for trial in trials),
        last=trials[-1].at,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What the status of a group follows from: `failures` of `trials` planned ones differed, some
    were wrong, the same inputs more than once (confirmed), and a diagnosis has found a cause."""

    trials: int
    failures: int
    is_wrong: bool
    is_confirmed: bool
    is_promised: bool
    is_explained: bool


def status_of(found: Evidence) -> Status:
    if found.is_confirmed:
        return Status.WRONG
    if found.is_wrong:
        return Status.UNDECIDED
    if not found.is_promised:
        return Status.NOT_PROMISED
    decision = TEST.decide(found.failures, found.trials)
    if decision is Decision.FAIL or found.is_explained:
        return Status.FLAKY
    # a difference that was seen once is no noise of a measurement
    is_clean = decision is Decision.PASS and not found.failures
    return Status.STABLE if is_clean else Status.UNDECIDED


def is_confirmed(wrong: Sequence[TrialRecord]) -> bool:
    """Whether the same inputs were wrong in two processes."""
    places: dict[tuple[str, int], set[tuple[str, int]]] = defaultdict(set)
    for trial in wrong:
        places[trial.case, trial.draw].add((trial.run, trial.process))
    return any(len(found) > 1 for found in places.values())


def differing_trials(
    trials: Sequence[TrialRecord], environments: Mapping[str, str]
) -> dict[tuple[str, int], Scope]:
    """The trials of one source whose bits are not those of most others with equal inputs, by run
    and number.

    environments: of each run, as a key; bits of different ones are not compared.
    """
    alike: dict[tuple[str, int, str], list[TrialRecord]] = defaultdict(list)
    found: dict[tuple[str, int], Scope] = {}
    for trial in trials:
        if trial.cause:
            # the result of a diagnosis, which is no trial
            continue
        if trial.outcome is Outcome.DIFFERENT:
            found[_name(trial)] = Scope.PROCESS
        elif trial.digest and trial.outcome is Outcome.RIGHT:
            alike[trial.case, trial.draw, environments.get(trial.run, "")].append(trial)
    for group in alike.values():
        usual = usual_digest(group)
        for trial in group:
            if trial.digest != usual:
                found[_name(trial)] = _scope(trial, group)
    return found


def usual_digest(trials: Iterable[TrialRecord]) -> str:
    """The digest that most trials with equal inputs have; of two that as many have, the older."""
    counts = Counter(trial.digest for trial in trials if trial.digest)
    return max(counts, key=counts.__getitem__, default="")


def _scope(trial: TrialRecord, group: Sequence[TrialRecord]) -> Scope:
    """Other bits only on another GPU, if all trials of this GPU agree with each other."""
    gpu = trial.conditions.get("gpu", "")
    here = {t.digest for t in group if t.conditions.get("gpu", "") == gpu}
    elsewhere = any(t.conditions.get("gpu", "") != gpu for t in group)
    return Scope.GPUS if len(here) == 1 and elsewhere else Scope.PROCESSES


def _name(trial: TrialRecord) -> tuple[str, int]:
    return trial.run, trial.number
