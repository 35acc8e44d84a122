"""Runs waves: starts the processes of each, and adds every trial to the history as it ends."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from loragate.core.child_process import signal_name
from loragate.core.gpu_health import HealthReader
from loragate.history import History, Outcome, PathFiles, Purpose, TrialRecord
from loragate.matrix.case_run import CaseRun
from loragate.nightly.conditions import Conditions
from loragate.nightly.plan import Measure, Wanted, Wave
from loragate.plugin.crash_report import crash_report
from loragate.scan.messages import Began, Measured, Message, Order, Step
from loragate.scan.processes import Process, Processes

# ids that a crash report names
_BEFORE_SHOWN = 5


@dataclass(frozen=True, slots=True)
class Shown:
    """A trial that has ended: what its process said, and its record. `process`: its process among
    those of the wave."""

    wanted: Wanted
    process: int
    measured: Measured
    record: TrialRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What the trials of one run of a scan have in common. runs: a run of each case by its id."""

    run: str
    runs: Mapping[str, CaseRun]
    history: History
    processes: Processes
    health: HealthReader
    folder: Path
    clock: Callable[[], float] = time.time


class Waves:
    """One wave at a time."""

    def __init__(self, around: Surroundings) -> None:
        self._around = around
        self._numbers = _Counter()
        self._processes = _Counter()
        # of cases that have run in this scan: the name of the path and its key
        self.paths: dict[str, tuple[str, str]] = {}
        # what a process that died was running on: as the one before it
        self._device = ""

    def next_number(self) -> int:
        """The number of another record of this run."""
        return self._numbers()

    def now(self) -> float:
        """The time of a record."""
        return self._around.clock()

    def run(
        self,
        wave: Wave,
        purpose: Purpose,
        *,
        until: float,
        keeps: Callable[[int, int], bool] = lambda index, process: True,
    ) -> list[Shown]:
        """Run a wave to its end, or up to `until` on the monotonic clock; what runs then is lost.

        keeps: by its place and its process within the wave, whether a trial becomes a record.
        """
        shown: list[Shown] = []
        with TemporaryDirectory(dir=self._around.folder) as folder:
            orders = self._orders(wave, Path(folder))
            running = [
                _Running(self._around.processes.start(o), o, self._processes()) for o in orders
            ]
            of = {id(each.process): each for each in running}
            try:
                for process, message in self._around.processes.listen(
                    [each.process for each in running], until
                ):
                    each = of[id(process)]
                    ended = each.hear(message)
                    if ended is not None and keeps(ended.index, each.order.number):
                        shown.append(self._add(each, ended, purpose))
                    if message is None:
                        # the others do not wait for it
                        each.order.through(each.order.number).touch()
            finally:
                self._finish(running)
        return shown

    def _finish(self, running: Sequence[_Running]) -> None:
        late = [each.process for each in running if each.process.status is None]
        for process in late:
            self._around.processes.end(process)
        # their folder is removed next
        for _ in self._around.processes.listen(late, time.monotonic() + 10):
            pass
        for each in running:
            self._around.processes.forget(each.process)

    def _orders(self, wave: Wave, folder: Path) -> list[Order]:
        orders = []
        for number, (conditions, wanted) in enumerate(wave.processes):
            own = folder / str(number)
            own.mkdir()
            steps = tuple(self._step(each) for each in wanted)
            orders.append(
                Order(
                    steps=steps,
                    conditions=conditions,
                    folder=own,
                    wave=folder,
                    number=number,
                    peers=len(wave.processes),
                )
            )
        return orders

    def _step(self, wanted: Wanted) -> Step:
        run = replace(self._around.runs[wanted.case], draw=wanted.draw)
        traced = wanted.measure is Measure.BITS and wanted.case not in self.paths
        return Step(run=run, measure=wanted.measure, traced=traced)

    def _add(self, each: _Running, measured: Measured, purpose: Purpose) -> Shown:
        step = each.order.steps[measured.index]
        run, case = step.run, step.run.case
        if measured.path:
            self.paths[run.run_id] = f"{run.subject} {measured.path}", measured.path_key
            if measured.path_key:
                known = PathFiles(path_key=measured.path_key, files=measured.files)
                self._around.history.add_path(known)
        unknown = f"{run.subject} {case.site} {case.execution}", ""
        path, key = self.paths.get(run.run_id, unknown)
        conditions = each.order.conditions
        self._device = measured.device or self._device
        record = TrialRecord(
            run=self._around.run,
            number=self._numbers(),
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
        self._around.history.add(record)
        wanted = Wanted(case=run.run_id, draw=run.draw, measure=step.measure)
        return Shown(wanted, each.order.number, measured, record)


class _Counter:
    def __init__(self) -> None:
        self._next = 0

    def __call__(self) -> int:
        self._next += 1
        return self._next - 1


class _Running:
    """A process of a wave: what it was heard of last."""

    def __init__(self, process: Process, order: Order, number: int) -> None:
        self.process, self.order, self.number = process, order, number
        self._began: int | None = None
        self._ended = 0
        self._begin = time.monotonic()

    def hear(self, message: Message | None) -> Measured | None:
        """The end of a trial: told by its process, or with the process itself."""
        if isinstance(message, Began):
            self._began, self._begin = message.index, time.monotonic()
            return None
        if message is not None:
            self._began, self._ended = None, message.index
            return message
        if self._began is not None:
            return self._crash(self._began, "")
        # whatever ran last may have left behind what ended the process
        return self._crash(self._ended, " behind it") if self.process.status else None

    def _crash(self, index: int, when: str) -> Measured:
        status = self.process.status or 0
        died = f"died of {signal_name(status)}" if status < 0 else f"exited with {status}"
        before = [step.run.id for step in self.order.steps[:index]]
        end = crash_report(
            self.order.steps[index].run,
            worker="scan",
            gpu=self.order.conditions.gpu,
            duration_s=time.monotonic() - self._begin,
            stacks=self.order.stacks,
            ran_before=before[-_BEFORE_SHOWN:],
            died=f"the process of the trial {died}{when}",
        )
        return Measured(
            index=index,
            outcome=Outcome.WRONG,
            failure=end.failure.value if end.failure else "",
            message=end.message,
            digests=(),
            duration_s=end.duration_s,
            device="",
            promised=True,
        )


def alone(wanted: Sequence[Wanted], conditions: Conditions) -> Wave:
    """One process, with as many neighbours of the same trials as its conditions say."""
    each = (conditions, tuple(wanted))
    return Wave(processes=(each,) * (1 + conditions.neighbours))
