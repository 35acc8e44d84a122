"""A scan: waves of trials until the time is spent, and a diagnosis of whatever differs.

Invariant: what a trial has shown is added to the history as soon as it is heard of, so that a scan
that is interrupted or killed loses no more than the trials that run at that moment. The next scan
goes on where the history is thinnest.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from loragate.history import History, Outcome, Purpose, TrialRecord
from loragate.history.model import ScanRun, glance_at
from loragate.nightly.plan import next_wave, short_wave
from loragate.nightly.standing import Standing
from loragate.nightly.suspects import Diagnosis
from loragate.nightly.wave import Known, Measure, Place, Wanted, Wave
from loragate.scan.investigate import Investigation, of_case, record_of
from loragate.scan.progress import Progress
from loragate.scan.surroundings import Shown
from loragate.scan.waves import Waves

# of the time of a scan, what diagnoses may take while there are paths to decide
_DIAGNOSES = 0.3
# older trials say little about the code of today
_REMEMBERED_S = 60 * 86400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """changed: the cases that a revision may have changed; None: it was not asked. only_judged:
    cases whose bits cannot be compared. large: cases that need more device memory than a worker
    has."""

    run: ScanRun
    cases: tuple[str, ...]
    place: Place
    budget_s: float
    seed: int
    changed: frozenset[str] | None = None
    only_judged: frozenset[str] = frozenset()
    large: frozenset[str] = frozenset()


class Scan:
    """One run of a scan."""

    def __init__(
        self, setup: Setup, waves: Waves, history: History, say: Callable[[str], None]
    ) -> None:
        self._setup, self._waves, self._history, self._say = setup, waves, history, say
        self._begin = time.monotonic()
        # of this run alone
        self.trials: list[TrialRecord] = []
        self.standing = Standing(setup.cases, [*history.runs(), setup.run])
        for glance in history.glances(since=setup.run.started_at - _REMEMBERED_S):
            self.standing.add(glance)
        self._progress = Progress(say)
        # whether there was a path that is undecided, and of which nothing odd was known
        self._is_searching = True
        self._beside: dict[int, Sequence[Wanted]] = {}
        self._diagnosed: set[tuple[str, str, Measure]] = set()
        self._cut: set[tuple[str, str, Measure]] = set()
        self._diagnosing_s = 0.0
        self._number = self._short_waves = 0
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
        # of what a wave shows for the first time nothing is known
        self._is_searching = self.standing.is_searching
        shown = self._wave(wave)
        trials = [each.record for each in shown]
        self._progress.tell(self._spent(), self._number, wave, trials)
        self._investigate(shown)
        self._number += 1

    def close(self) -> None:
        """End the trials that run."""
        self._progress.close(self._spent())
        self._waves.close()
        # trials that ended while the workers were to stop, and the time was over before they had
        for each in self._waves.heard():
            self._add(each.record)

    def _known(self) -> dict[str, Known]:
        return self.standing.known(
            changed=self._setup.changed,
            traced=self._waves.trials.paths.keys(),
            only_judged=self._setup.only_judged,
            large=self._setup.large,
        )

    def _short_wave(self) -> Wave | None:
        self._short_waves += 1
        place, seed = self._setup.place, self._setup.seed
        return short_wave(self._known(), place, number=self._short_waves, seed=seed)

    def _spent(self) -> float:
        return time.monotonic() - self._begin

    def _left(self) -> float:
        return self._end() - time.monotonic()

    def _end(self) -> float:
        return self._begin + self._setup.budget_s

    def _wave(self, wave: Wave) -> list[Shown]:
        if wave.is_alone:
            shown = self._waves.run(
                wave, Purpose.PLANNED, until=self._end(), short=self._short_wave
            )
        else:
            shown = self._waves.keep_busy(wave, until=self._end(), meanwhile=self._meanwhile)
        for each in shown:
            self._add(each.record)
        self._beside |= {each.record.process: each.order for each in shown}
        return shown

    def _meanwhile(self, ended: int) -> None:
        self._progress.meanwhile(self._spent(), self._number, ended)

    def _add(self, trial: TrialRecord) -> None:
        self.trials.append(trial)
        self.standing.add(glance_at(trial))

    def _investigate(self, shown: Iterable[Shown]) -> None:
        """Find out what each new suspect depends on, one of a path at a time."""
        for suspect in self._suspects(list(shown)):
            wanted = suspect.wanted
            key = (suspect.record.path, suspect.record.grouped, wanted.measure)
            if key in self._diagnosed or self.standing.is_explained(glance_at(suspect.record)):
                continue
            begin = time.monotonic()
            until = min(self._end(), begin + self._for_diagnoses())
            if begin >= until:
                return
            self._diagnosed.add(key)
            found = Investigation(self._waves, wanted, self._setup.place, until=until).run(
                of_case(self.trials, wanted), self._beside
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
        record = record_of(found, seen, self._waves.trials.next_number(), self._waves.now())
        self._history.add(record)
        self._add(record)
        self._say(f"{'':10}{seen.case}: {found.cause}: {found.explanation}")

    def _suspects(self, shown: Sequence[Shown]) -> list[Shown]:
        """Trials of a wave that are wrong, or whose case and draw has trials with other bits."""
        return [
            each
            for each in shown
            if each.record.outcome is Outcome.WRONG
            or (each.record.promised and each.record.outcome is Outcome.DIFFERENT)
            or (
                each.record.promised
                and each.record.measure == Measure.BITS
                and self.standing.has_other_bits(glance_at(each.record))
            )
        ]
