"""A scan: waves of trials until the time is spent, and a diagnosis of whatever differs.

Invariant: what a trial has shown is added to the history as soon as it is heard of, so that a scan
that is interrupted or killed loses no more than the trials that run at that moment. The next scan
goes on where the history is thinnest.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from loragate.core.plural import counted
from loragate.history import History, Outcome, Purpose, TrialRecord
from loragate.history.model import ScanRun
from loragate.nightly.conditions import Cause
from loragate.nightly.diagnosis import Diagnosis
from loragate.nightly.environment import environment_key
from loragate.nightly.plan import Known, Measure, Place, Wanted, Wave, known_cases, next_wave
from loragate.nightly.states import Status, differing_trials, group_key, states
from loragate.scan.investigate import Investigation, of_case, record_of
from loragate.scan.waves import Shown, Waves

# of the time of a scan, what diagnoses may take while there are paths to decide
_DIAGNOSES = 0.3
# older trials say little about the code of today
_REMEMBERED_S = 60 * 86400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """changed: the cases that a revision may have changed; None: it was not asked. only_judged:
    cases whose bits cannot be compared."""

    run: ScanRun
    cases: tuple[str, ...]
    place: Place
    budget_s: float
    seed: int
    changed: frozenset[str] | None = None
    only_judged: frozenset[str] = frozenset()


class Scan:
    """One run of a scan."""

    def __init__(
        self, setup: Setup, waves: Waves, history: History, say: Callable[[str], None]
    ) -> None:
        self._setup, self._waves, self._history, self._say = setup, waves, history, say
        self._begin = time.monotonic()
        self._trials = list(history.trials(since=setup.run.started_at - _REMEMBERED_S))
        self._runs = [*history.runs(), setup.run]
        self._beside: dict[int, Sequence[Wanted]] = {}
        self._diagnosed: set[tuple[str, str, Measure]] = set()
        self._cut: set[tuple[str, str, Measure]] = set()
        self._diagnosing_s = 0.0
        # whether there is a path that is undecided, and of which nothing odd is known
        self._is_searching = True
        self._number = 0
        self._last: Wave | None = None

    def run(self) -> None:
        """Until the budget is spent. Raises CommandError where no trial can be started."""
        try:
            while self._left() > 0:
                self.step()
        finally:
            self.close()

    def step(self) -> None:
        """One more wave for workers that are free, and the diagnosis of what differs so far."""
        wave = self._last = next_wave(
            self._known(),
            self._setup.place,
            number=self._number,
            seed=self._setup.seed,
            seconds_left=self._left(),
            previous=self._last,
        )
        shown = self._wave(wave)
        self._tell(wave, shown)
        self._investigate(shown)
        self._number += 1

    def close(self) -> None:
        """End the trials that run."""
        self._waves.close()

    def _left(self) -> float:
        return self._begin + self._setup.budget_s - time.monotonic()

    def _end(self) -> float:
        return self._begin + self._setup.budget_s

    def _known(self) -> dict[str, Known]:
        found = states(self._trials, self._runs)
        self._is_searching = any(
            state.status is Status.UNDECIDED and not state.suspects for state in found.values()
        ) or not set(self._setup.cases) <= {trial.case for trial in self._trials}
        undecided = {
            trial.case
            for trial in self._trials
            if found[group_key(trial)].status is Status.UNDECIDED
        }
        return known_cases(
            self._setup.cases,
            self._trials,
            changed=self._setup.changed,
            undecided=undecided,
            traced=self._waves.paths.keys(),
            only_judged=self._setup.only_judged,
        )

    def _wave(self, wave: Wave) -> list[Shown]:
        if wave.is_alone:
            shown = self._waves.run(wave, Purpose.PLANNED, until=self._end())
        else:
            shown = self._waves.keep_busy(wave, until=self._end())
        self._trials += [each.record for each in shown]
        self._beside |= {each.record.process: each.order for each in shown}
        return shown

    def _tell(self, wave: Wave, shown: Sequence[Shown]) -> None:
        conditions = wave.processes[0][0]
        varied = ", ".join(f"{name} {value}" for name, value in conditions.varied().items())
        odd = sum(each.record.outcome in (Outcome.DIFFERENT, Outcome.WRONG) for each in shown)
        what = counted(len(shown), "trial")
        self._say(
            f"{self._setup.budget_s - self._left():6.0f} s  wave {self._number}: {what} "
            f"({wave.processes[0][1][0].measure}; {varied or 'nothing varied'})"
            + (f", {odd} not as they should be" if odd else "")
        )

    def _investigate(self, shown: Iterable[Shown]) -> None:
        """Find out what each new suspect depends on, one of a path at a time."""
        for suspect in self._suspects(list(shown)):
            wanted = suspect.wanted
            key = (suspect.record.path, suspect.record.grouped, wanted.measure)
            if key in self._diagnosed or self._is_explained(suspect.record):
                continue
            self._diagnosed.add(key)
            begin = time.monotonic()
            until = min(self._end(), begin + self._for_diagnoses())
            if begin >= until:
                return
            found = Investigation(self._waves, wanted, self._setup.place, until=until).run(
                of_case(self._of_this_run(), wanted), self._beside
            )
            self._diagnosing_s += time.monotonic() - begin
            if found.is_cut and key not in self._cut:
                # once more, if there is time
                self._diagnosed.remove(key)
                self._cut.add(key)
            self._conclude(found, suspect.record)

    def _for_diagnoses(self) -> float:
        """The seconds that diagnoses may still take: all that is left once nothing else is to be
        found out."""
        if not self._is_searching:
            return self._left()
        return self._setup.budget_s * _DIAGNOSES - self._diagnosing_s

    def _conclude(self, found: Diagnosis, seen: TrialRecord) -> None:
        record = record_of(found, seen, self._waves.next_number(), self._waves.now())
        self._history.add(record)
        self._trials.append(record)
        self._say(f"{'':10}{seen.case}: {found.cause}: {found.explanation}")

    def _is_explained(self, seen: TrialRecord) -> bool:
        return any(
            trial.cause not in ("", Cause.UNKNOWN)
            and (trial.path, trial.path_key, trial.grouped)
            == (seen.path, seen.path_key, seen.grouped)
            and trial.measure == seen.measure
            for trial in self._trials
        )

    def _of_this_run(self) -> list[TrialRecord]:
        return [trial for trial in self._trials if trial.run == self._setup.run.uid]

    def _suspects(self, shown: Sequence[Shown]) -> list[Shown]:
        """Trials of a wave that are wrong, or whose case and draw has trials with other bits."""
        environments = {run.uid: environment_key(run.environment) for run in self._runs}
        cases: Collection[str] = {each.record.case for each in shown}
        keys = {each.record.case: each.record.path_key for each in shown}
        alike = [t for t in self._trials if t.case in cases and t.path_key == keys[t.case]]
        differing = differing_trials(alike, environments)
        inputs = {(t.case, t.draw) for t in alike if (t.run, t.number) in differing}
        return [
            each
            for each in shown
            if each.record.outcome is Outcome.WRONG
            or (
                each.record.promised
                and each.record.measure == Measure.BITS
                and (each.record.case, each.record.draw) in inputs
            )
            or (each.record.promised and each.record.outcome is Outcome.DIFFERENT)
        ]
