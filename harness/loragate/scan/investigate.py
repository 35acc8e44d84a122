"""From a trial that differed to what its result depends on: the trials that `diagnose` asks for."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from loragate.history import Outcome, Purpose, TrialRecord
from loragate.nightly.conditions import conditions_of
from loragate.nightly.diagnosis import diagnose
from loragate.nightly.replays import AFTER, replay_of_diagnosis
from loragate.nightly.suspects import Cell, Diagnosis, Sighting, Suspect, TimeSpentError
from loragate.nightly.wave import Measure, Place, Wanted
from loragate.scan.messages import Measured
from loragate.scan.waves import Waves, alone

# a single cell may not take the time of all others
_CELL_S = 300.0


class Investigation:
    """Of one case and draw, by one measure."""

    def __init__(self, waves: Waves, wanted: Wanted, place: Place, *, until: float) -> None:
        self._waves, self._wanted, self._place, self._until = waves, wanted, place, until
        self._by_id: dict[str, Wanted] = {}

    def run(self, seen: Sequence[TrialRecord], beside: Mapping[int, Sequence[Wanted]]) -> Diagnosis:
        """seen: the trials of the case and draw in this run of the scan. beside: what each process
        of the run was asked for, in its order."""
        sightings = []
        for trial in seen:
            before = beside.get(trial.process, ())[: trial.place]
            self._by_id |= {wanted.id: wanted for wanted in before}
            ids = tuple(wanted.id for wanted in before)
            conditions = conditions_of(trial.conditions)
            sightings.append(
                Sighting(signature=_of_record(trial), conditions=conditions, before=ids)
            )
        wrong = {s.signature for s in sightings if s.signature.startswith(Outcome.WRONG)}
        suspect = Suspect(sightings=tuple(sightings), wrong=frozenset(wrong), gpus=self._place.gpus)
        return diagnose(suspect, self._try)

    def _try(self, cell: Cell, count: int) -> Sequence[str]:
        signatures: list[str] = []
        steps = [*(self._by_id[name] for name in cell.before), self._wanted]
        end = min(self._until, time.monotonic() + _CELL_S)
        for _ in range(count):
            shown = self._waves.run(
                alone(steps, cell.conditions),
                Purpose.DIAGNOSE,
                until=end,
                # of neighbours as well: they have the same conditions
                keeps=lambda index, process: index == len(steps) - 1,
            )
            if time.monotonic() >= end:
                raise TimeSpentError
            signatures += [s for each in shown for s in signatures_of(each.measured)]
        return signatures


def signatures_of(measured: Measured) -> tuple[str, ...]:
    """What a trial has shown: bits, or a verdict. Nothing where the machine failed."""
    if measured.outcome in (Outcome.INFRA, Outcome.UNKNOWN):
        return ()
    return measured.digests or (f"{measured.outcome} {measured.failure}",)


def _of_record(trial: TrialRecord) -> str:
    if trial.outcome is Outcome.DIFFERENT and trial.measure == Measure.BITS:
        # unlike any other
        return f"changed {trial.digest}"
    return trial.digest or f"{trial.outcome} {trial.failure}"


def record_of(diagnosis: Diagnosis, seen: TrialRecord, number: int, at: float) -> TrialRecord:
    """The record of what was found out about a trial at the time `at`."""
    conditions = diagnosis.cell.conditions.varied() if diagnosis.cell else {}
    return replace(
        seen,
        number=number,
        at=at,
        purpose=Purpose.DIAGNOSE,
        cause=diagnosis.cause.value,
        message=diagnosis.explanation,
        digest="",
        duration_s=0.0,
        replay=replay_of_diagnosis(diagnosis, seen),
        conditions=conditions | ({AFTER: diagnosis.polluter} if diagnosis.polluter else {}),
    )


def of_case(trials: Iterable[TrialRecord], wanted: Wanted) -> list[TrialRecord]:
    """The planned trials of a case and draw by one measure that have shown anything."""
    return [
        trial
        for trial in trials
        if (trial.case, trial.draw, trial.measure) == (wanted.case, wanted.draw, wanted.measure)
        and trial.purpose is Purpose.PLANNED
        and trial.outcome not in (Outcome.INFRA, Outcome.UNKNOWN)
    ]
