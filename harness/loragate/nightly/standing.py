"""What all trials so far say of paths and cases, kept up as trials arrive. Pure.

Invariant: the statuses are those that `states` finds in the same trials, whatever their order in
time. A trial costs the same however many there are: a scan asks after every wave, and a history has
hundreds of thousands.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from loragate.history.model import JUDGED, Glance, Outcome, Purpose, ScanRun
from loragate.nightly.conditions import Cause
from loragate.nightly.environment import environment_key
from loragate.nightly.sources import Source, Sources
from loragate.nightly.states import Evidence, GroupKey, Status, status_of
from loragate.nightly.wave import UNTIMED_S, Known, Measure


class Standing:
    """Add trials the oldest first. cases: those that are planned. runs: those of the trials."""

    def __init__(self, cases: Iterable[str], runs: Iterable[ScanRun]) -> None:
        runs = tuple(runs)
        self._environments = {run.uid: environment_key(run.environment) for run in runs}
        self._sources: Sources[Glance] = Sources(runs)
        self._groups: dict[tuple[str, str, str], _Group] = {}
        # the groups of each source; nearly always it is one
        self._groups_of: dict[Source, set[tuple[str, str, str]]] = {}
        self._planned = {case: _Planned() for case in cases}
        # of planned cases alone, by path and group
        self._alone: Counter[str] = Counter()
        self._explained: set[tuple[str, str, str, str]] = set()

    def add(self, trial: Glance) -> None:
        ended = self._sources.ended_by(trial)
        for source in ended.sources:
            self._forget(source)
        for each in ended.again:
            self._count(each, self._sources.of(each))
        self._count(trial, self._sources.of(trial))
        planned = self._planned.get(trial.case)
        if planned is not None:
            planned.add(trial)
            self._alone[planned.path] += trial.is_alone
        if trial.cause not in ("", Cause.UNKNOWN):
            self._explained.add(_explanation(trial))

    def _count(self, trial: Glance, source: Source) -> None:
        key = trial.path, trial.grouped, trial.device
        group = self._groups.get(key)
        if group is None:
            group = self._groups[key] = _Group()
        group.add(trial, source, self._environments.get(trial.run, ""))
        self._groups_of.setdefault(source, set()).add(key)
        planned = self._planned.get(trial.case)
        # where the machine failed nothing is known of the case
        if planned is not None and trial.outcome in JUDGED:
            planned.count(trial, source)

    def _forget(self, source: Source) -> None:
        for key in self._groups_of.pop(source, ()):
            self._groups[key].forget(source)
            if not self._groups[key].tallies:
                del self._groups[key]
        if source.case in self._planned:
            self._planned[source.case].counts.pop(source, None)

    def statuses(self) -> dict[GroupKey, Status]:
        return {GroupKey(*key): group.status for key, group in self._groups.items()}

    @property
    def is_searching(self) -> bool:
        """Whether a planned case was never tried, or a path is undecided with nothing odd seen."""
        return any(not planned.path for planned in self._planned.values()) or any(
            group.status is Status.UNDECIDED and not group.is_odd for group in self._groups.values()
        )

    def known(
        self,
        *,
        changed: Collection[str] | None,
        traced: Collection[str],
        only_judged: Collection[str] = (),
        large: Collection[str] = (),
    ) -> dict[str, Known]:
        """changed: the cases that a revision may have changed; None where no revision was named. A
        case without trials counts as undecided. traced: cases whose path is known. only_judged:
        cases without bits. large: cases that need more memory than a worker has."""
        undecided: set[str] = set()
        for group in self._groups.values():
            if group.status is Status.UNDECIDED:
                undecided.update(source.case for source in group.tallies)
        return {
            case: Known(
                bits=planned.trials(Measure.BITS),
                judged=planned.trials(Measure.JUDGED),
                bits_s=planned.bits_s,
                judged_s=planned.judged_s,
                changed=changed is None or case in changed,
                decided=bool(planned.path) and case not in undecided,
                traced=case in traced,
                path=planned.path,
                alone=self._alone[planned.path],
                has_bits=case not in only_judged,
                is_large=case in large,
            )
            for case, planned in self._planned.items()
        }

    def has_other_bits(self, trial: Glance) -> bool:
        """Whether the inputs of a trial, which was added, gave several results."""
        group = self._groups.get((trial.path, trial.grouped, trial.device))
        tally = group.tallies.get(self._sources.of(trial)) if group else None
        return tally is not None and trial.draw in tally.odd_draws

    def is_explained(self, trial: Glance) -> bool:
        """Whether a diagnosis has found the cause of what such a trial shows."""
        return _explanation(trial) in self._explained


def _explanation(trial: Glance) -> tuple[str, str, str, str]:
    return trial.path, trial.path_key, trial.grouped, trial.measure


@dataclass(slots=True)
class _Planned:
    """What is known of a case, from all its groups. path_key: of the last trial that has one.
    counts: the trials of each source that have shown anything, by measure."""

    bits_s: float = UNTIMED_S
    judged_s: float = UNTIMED_S
    path: str = ""
    path_key: str = ""
    counts: dict[Source, Counter[str]] = field(default_factory=dict)

    def add(self, trial: Glance) -> None:
        self.path_key = trial.path_key or self.path_key
        self.path = f"{trial.path} {trial.grouped}"
        if trial.measure == Measure.BITS:
            self.bits_s = trial.duration_s
        else:
            self.judged_s = trial.duration_s

    def count(self, trial: Glance, source: Source) -> None:
        self.counts.setdefault(source, Counter())[trial.measure] += 1

    def trials(self, measure: Measure) -> int:
        """Of the source of the last trial; what other machines run says nothing about it."""
        now = ("", self.path_key)
        return sum(n[measure] for source, n in self.counts.items() if source.path_key in now)


class _Group:
    """The trials of a path, group and device. tallies: of each source that counts."""

    __slots__ = ("_status", "tallies")

    def __init__(self) -> None:
        self.tallies: dict[Source, _Tally] = {}
        self._status: Status | None = None

    def add(self, trial: Glance, source: Source, environment: str) -> None:
        tally = self.tallies.get(source)
        if tally is None:
            tally = self.tallies[source] = _Tally()
        tally.add(trial, environment)
        self._status = None

    def forget(self, source: Source) -> None:
        del self.tallies[source]
        self._status = None

    @property
    def is_odd(self) -> bool:
        return any(tally.is_odd for tally in self.tallies.values())

    @property
    def status(self) -> Status:
        if self._status is None:
            tallies = self.tallies.values()
            self._status = status_of(
                Evidence(
                    trials=sum(tally.trials for tally in tallies),
                    failures=sum(tally.failures for tally in tallies),
                    is_wrong=any(tally.wrong_in for tally in tallies),
                    is_confirmed=self._is_confirmed(),
                    is_promised=all(tally.is_promised for tally in tallies),
                    is_explained=any(tally.is_explained for tally in tallies),
                )
            )
        return self._status

    def _is_confirmed(self) -> bool:
        """Also if the two processes ran different sources."""
        places: dict[tuple[str, int], tuple[str, int]] = {}
        return any(tally.is_confirmed for tally in self.tallies.values()) or any(
            places.setdefault((source.case, draw), place) != place
            for source, tally in self.tallies.items()
            for draw, place in tally.wrong_in.items()
        )


@dataclass(slots=True)
class _Tally:
    """The trials of a source in one group.

    trials: the planned ones that count in a rate, of which `failures` differed. wrong_in: a process
    in which each draw was wrong. odd_draws: those that gave several results. is_promised: by the
    last trial.
    """

    trials: int = 0
    failures: int = 0
    is_odd: bool = False
    is_confirmed: bool = False
    is_explained: bool = False
    is_promised: bool = True
    wrong_in: dict[int, tuple[str, int]] = field(default_factory=dict)
    odd_draws: set[int] = field(default_factory=set)
    _alike: dict[tuple[int, str], _Alike] = field(default_factory=dict)

    def add(self, trial: Glance, environment: str) -> None:
        outcome = trial.outcome
        self.is_promised = trial.promised
        counts = trial.purpose is Purpose.PLANNED and (
            outcome is Outcome.RIGHT or outcome is Outcome.DIFFERENT
        )
        self.trials += counts
        if outcome is Outcome.WRONG:
            self.is_odd = True
        if trial.cause:
            # the result of a diagnosis, which is no trial
            self.is_explained |= trial.cause != Cause.UNKNOWN
        elif outcome is Outcome.WRONG:
            place = trial.run, trial.process
            self.is_confirmed |= self.wrong_in.setdefault(trial.draw, place) != place
        elif outcome is Outcome.DIFFERENT:
            self.failures += counts
            self._differs(trial.draw)
        elif outcome is Outcome.RIGHT and trial.digest:
            self._compare(trial, environment, counts=counts)

    def _compare(self, trial: Glance, environment: str, *, counts: bool) -> None:
        key = trial.draw, environment
        alike = self._alike.get(key)
        if alike is None:
            alike = self._alike[key] = _Alike(trial.digest)
        before = alike.failures
        alike.add(trial.digest, counts=counts)
        self.failures += alike.failures - before
        if alike.others:
            self._differs(trial.draw)

    def _differs(self, draw: int) -> None:
        self.is_odd = True
        self.odd_draws.add(draw)


class _Alike:
    """Trials with equal inputs.

    usual: the digest of the most trials; of two that as many have, the older. others: for each
    other digest its trials, how many of them count in a rate, and its place by age. failures: the
    trials of others that count.
    """

    __slots__ = ("_place", "counted", "failures", "others", "trials", "usual")

    def __init__(self, digest: str) -> None:
        self.usual, self._place = digest, 0
        self.trials = self.counted = self.failures = 0
        # most inputs have none
        self.others: dict[str, tuple[int, int, int]] | None = None

    def add(self, digest: str, *, counts: bool) -> None:
        if digest == self.usual:
            self.trials += 1
            self.counted += counts
            return
        others = self.others = self.others or {}
        trials, counted, place = others.get(digest, (0, 0, len(others) + 1))
        trials, counted = trials + 1, counted + counts
        self.failures += counts
        if (trials, -place) > (self.trials, -self._place):
            others.pop(digest, None)
            others[self.usual] = self.trials, self.counted, self._place
            self.failures += self.counted - counted
            self.usual, self.trials, self.counted, self._place = digest, trials, counted, place
        else:
            others[digest] = trials, counted, place
