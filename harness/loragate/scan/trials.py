"""The records of a scan's trials, and what is known of its cases from those that have ended."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import count

from loragate.history import PathFiles, Purpose, TrialRecord
from loragate.matrix.case import Site
from loragate.nightly.wave import Measure, Wanted
from loragate.scan.messages import Measured, Step
from loragate.scan.running import Running
from loragate.scan.surroundings import Shown, Surroundings


class Trials:
    """Adds every trial to the history as it ends."""

    def __init__(self, around: Surroundings) -> None:
        self._around = around
        self._numbers = count()
        # of cases that have run in this scan: the name of the path and its key
        self.paths: dict[str, tuple[str, str]] = {}
        # of cases that have run in this scan: what the last trial took
        self._seconds: dict[tuple[str, Measure], float] = {}
        # of the last process that has begun a trial; one that dies earlier would run on the same
        self._device = ""

    def next_number(self) -> int:
        """The number of another record of this run."""
        return next(self._numbers)

    def seconds(self, wanted: Wanted) -> float:
        """What a trial is going to take; infinite for a case that has not run."""
        return self._seconds.get((wanted.case, wanted.measure), math.inf)

    def step(self, wanted: Wanted) -> Step:
        """As a process is told of a trial."""
        run = replace(self._around.runs[wanted.case], draw=wanted.draw)
        # oracles call a subject in many ways; an engine is traced without a call
        is_one_call = wanted.measure is Measure.BITS or run.case.site is Site.ENGINE
        traced = is_one_call and wanted.case not in self.paths
        return Step(run=run, measure=wanted.measure, traced=traced)

    def add(self, each: Running, measured: Measured, purpose: Purpose) -> Shown:
        """`measured`: by the process `each`."""
        step = each.order.steps[measured.index]
        self._seconds[step.run.run_id, step.measure] = measured.duration_s
        self._note_path(step, measured)
        self._device = each.device or self._device
        record = self._record(each, measured, purpose)
        self._around.history.add(record)
        return Shown(each.wanted[measured.index], each.wanted, measured, record)

    def _note_path(self, step: Step, measured: Measured) -> None:
        if not measured.path:
            return
        run = step.run
        self.paths[run.run_id] = f"{run.subject} {measured.path}", measured.path_key
        if measured.path_key:
            known = PathFiles(path_key=measured.path_key, files=measured.files)
            self._around.history.add_path(known)

    def _record(self, each: Running, measured: Measured, purpose: Purpose) -> TrialRecord:
        step = each.order.steps[measured.index]
        run, case = step.run, step.run.case
        unknown = f"{run.subject} {case.site} {case.execution}", ""
        path, key = self.paths.get(run.run_id, unknown)
        conditions = each.order.conditions
        return TrialRecord(
            run=self._around.run,
            number=next(self._numbers),
            at=self._around.clock(),
            case=run.run_id,
            subject=run.subject,
            site=case.site.value,
            path=path,
            path_key=key,
            grouped=case.dtype.value,
            device=self._device,
            draw=run.draw,
            measure=step.measure.value,
            purpose=purpose,
            outcome=measured.outcome,
            promised=measured.promised,
            failure=measured.failure,
            message=measured.message,
            digest=measured.digests[0] if measured.digests else "",
            process=each.number,
            place=measured.index,
            duration_s=round(measured.duration_s, 4),
            replay=run.replay,
            conditions=conditions.varied(),
            health=self._around.health.read(conditions.gpu) if conditions.gpu else {},
        )
