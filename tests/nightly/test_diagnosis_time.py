"""How much of a scan diagnoses may take: waves and diagnoses that are made up, and a clock."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from loragate.history import Outcome, ScanRun, TrialRecord, open_history
from loragate.nightly.conditions import Cause
from loragate.nightly.suspects import Diagnosis
from loragate.nightly.wave import Place, Wave
from loragate.scan import scan as module
from loragate.scan.messages import Measured
from loragate.scan.scan import Scan, Setup
from loragate.scan.surroundings import Shown

NewTrial = Callable[..., TrialRecord]

_BUDGET_S = 1000.0
_WAVE_S = 10.0
_MEASURED = Measured(
    index=0,
    outcome=Outcome.RIGHT,
    failure="",
    message="",
    digests=(),
    duration_s=0.1,
    promised=True,
)


class _Trials:
    def __init__(self) -> None:
        self.count = 0
        self.paths: dict[str, tuple[str, str]] = {}

    def next_number(self) -> int:
        self.count += 1
        return self.count


class _Lab:
    """Waves in which all cases but `quiet` give other bits; a diagnosis takes `takes_s`."""

    def __init__(self, trial: NewTrial, takes_s: float, *, always_cut: bool = False) -> None:
        self._trial, self._takes_s, self._always_cut = trial, takes_s, always_cut
        self.seconds = 0.0
        self.trials = _Trials()
        # the seconds that each diagnosis was given
        self.allowed: list[float] = []

    def keep_busy(self, wave: Wave, *, until: float, meanwhile: object) -> list[Shown]:
        self.seconds += _WAVE_S
        return [self._shown(wanted) for wanted in wave.processes[0][1]]

    def _shown(self, wanted: Any) -> Shown:
        outcome = Outcome.RIGHT if wanted.case == "quiet" else Outcome.DIFFERENT
        names = {"case": wanted.case, "path": wanted.case, "measure": wanted.measure}
        record = self._trial(self.trials.next_number(), outcome=outcome, **names)
        return Shown(wanted, (wanted,), _MEASURED, record)

    def now(self) -> float:
        return 1000.0 + self.trials.count

    def investigation(self, *of: object, until: float) -> SimpleNamespace:
        self.allowed.append(until - self.seconds)
        is_cut = self._always_cut or self._takes_s > self.allowed[-1]
        self.seconds += min(self._takes_s, self.allowed[-1])
        cause = Cause.UNKNOWN if is_cut else Cause.RUN_TO_RUN
        found = Diagnosis(cause=cause, explanation="", is_cut=is_cut)
        return SimpleNamespace(run=lambda *seen: found)


@pytest.fixture
def started(
    tmp_path: Path, scan_run: Callable[..., ScanRun], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[_Lab, Collection[str]], Scan]]:
    with open_history(tmp_path / "h.db") as history:
        history.add_run(scan_run())

        def start(lab: Any, cases: Collection[str]) -> Scan:
            monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: lab.seconds))
            monkeypatch.setattr(module, "Investigation", lab.investigation)
            setup = Setup(
                run=scan_run(),
                cases=tuple(cases),
                place=Place(),
                budget_s=_BUDGET_S,
                seed=1,
            )
            return Scan(setup, lab, history, lambda text: None)

        yield start


def test_diagnoses_take_a_part_of_the_time_while_a_path_is_undecided(
    trial: NewTrial, started: Callable[..., Scan]
) -> None:
    lab = _Lab(trial, takes_s=5000.0)
    scan = started(lab, ["odd", "quiet"])
    for _ in range(20):
        scan.step()
    assert lab.allowed == [300.0]


def test_a_diagnosis_that_was_cut_is_made_once_more_when_nothing_else_is_to_be_found(
    trial: NewTrial, started: Callable[..., Scan]
) -> None:
    lab = _Lab(trial, takes_s=400.0)
    scan = started(lab, ["odd"])
    while lab.seconds < _BUDGET_S:
        scan.step()
    # the first one before any trial was known, and of oracles what is left of the other one
    assert lab.allowed == [300.0, _BUDGET_S - 300.0 - 2 * _WAVE_S, 270.0]


def test_a_diagnosis_that_is_cut_again_is_not_made_for_ever(
    trial: NewTrial, started: Callable[..., Scan]
) -> None:
    # as one of which each trial hangs
    lab = _Lab(trial, takes_s=50.0, always_cut=True)
    scan = started(lab, ["odd"])
    while lab.seconds < _BUDGET_S:
        scan.step()
    # of bits and of oracles
    assert len(lab.allowed) == 2 * 2
