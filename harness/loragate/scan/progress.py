"""Lines about the waves of a scan: one in a few seconds, and each as soon as a case looks odd for
the first time."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from loragate.core.plural import counted
from loragate.history import Outcome, TrialRecord
from loragate.nightly.wave import Wave

# trials of bits end many times a second
_EVERY_S = 5.0
_ODD = (Outcome.DIFFERENT, Outcome.WRONG)


class Progress:
    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._told_s = -_EVERY_S
        # what no line has told of: the numbers of waves, and their trials
        self._waves: list[int] = []
        self._trials = self._odd = 0
        self._odd_cases: set[str] = set()

    def tell(self, at_s: float, number: int, wave: Wave, trials: Sequence[TrialRecord]) -> None:
        """After each wave, `at_s` seconds after the begin of the scan. What has ended may also be
        of earlier waves."""
        odd = [trial.case for trial in trials if trial.outcome in _ODD]
        self._waves.append(number)
        self._trials += len(trials)
        self._odd += len(odd)
        is_new = not self._odd_cases.issuperset(odd)
        self._odd_cases.update(odd)
        if is_new or at_s - self._told_s >= _EVERY_S:
            self._line(at_s, _about(wave))

    def meanwhile(self, at_s: float, number: int, ended: int) -> None:
        """While a wave runs, of which `ended` trials are through that `tell` will get."""
        if at_s - self._told_s >= _EVERY_S:
            trials = counted(self._trials + ended, "trial")
            self._say(
                f"{at_s:6.0f} s  wave {number} is running: {trials} since the last report of a wave"
            )
            self._told_s = at_s

    def close(self, at_s: float) -> None:
        """Tell of the last waves."""
        if self._trials:
            self._line(at_s, "")

    def _line(self, at_s: float, about: str) -> None:
        first, last = self._waves[0], self._waves[-1]
        waves = f"wave {last}" if first == last else f"waves {first} to {last}"
        odd = f", {self._odd} not as they should be" if self._odd else ""
        self._say(f"{at_s:6.0f} s  {waves}: {counted(self._trials, 'trial')}{about}{odd}")
        self._told_s = at_s
        self._waves, self._trials, self._odd = [], 0, 0


def _about(wave: Wave) -> str:
    conditions, wanted = wave.processes[0]
    varied = ", ".join(f"{name} {value}" for name, value in conditions.varied().items())
    return f", now {wanted[0].measure} with {varied or 'nothing varied'}"
