"""Runs waves: starts the processes of each, and hears what they have measured."""

from __future__ import annotations

import shutil
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp

from loragate.history import Purpose
from loragate.nightly.conditions import Cache, Conditions
from loragate.nightly.plan import SHORT_S
from loragate.nightly.wave import Wanted, Wave
from loragate.scan.messages import Measured, Order
from loragate.scan.running import Running
from loragate.scan.surroundings import Shown, Spent, Surroundings
from loragate.scan.trials import Trials

# a process that starts shares the GPU and the cores, and ahead of its first trial nothing stops it
_WORTH_A_START_S = 5.0


@dataclass(slots=True)
class _Worker:
    """waiting: its processes of later waves."""

    waiting: deque[tuple[Conditions, tuple[Wanted, ...]]] = field(default_factory=deque)
    running: Running | None = None


class Waves:
    """The workers of a scan. Each goes on with the next wave as soon as it is through with the one
    before, whatever the others do, until a wave is to run alone."""

    def __init__(self, around: Surroundings) -> None:
        self._around = around
        self.trials = Trials(around)
        self._processes = count()
        self._workers: list[_Worker] = []
        # what has ended and was not given to the caller
        self._shown: list[Shown] = []
        self.spent = Spent()

    def now(self) -> float:
        """The time of a record."""
        return self._around.clock()

    def keep_busy(
        self, wave: Wave, *, until: float, meanwhile: Callable[[int], None] = lambda count: None
    ) -> list[Shown]:
        """Give each worker a process of a wave, and return what has ended since the last time, once
        a worker has no more to do, or at `until` on the monotonic clock. The others go on.

        meanwhile: called about once a second with the number of trials that will be returned.
        """
        while len(self._workers) < len(wave.processes):
            self._workers.append(_Worker())
        for worker, process in zip(self._workers, wave.processes, strict=True):
            worker.waiting.append(process)
        self._begin_waiting()
        while len(self._busy()) == len(self._workers) and time.monotonic() < until:
            self._hear_workers(until)
            self._begin_waiting()
            meanwhile(len(self._shown))
        return self.heard()

    def heard(self) -> list[Shown]:
        """What has ended and was not given to anybody yet."""
        shown, self._shown = self._shown, []
        return shown

    def run(
        self,
        wave: Wave,
        purpose: Purpose,
        *,
        until: float,
        keeps: Callable[[int, int], bool] = lambda index, process: True,
        short: Callable[[], Wave | None] = lambda: None,
    ) -> list[Shown]:
        """Run a wave to its end with nothing else beside it, or up to `until` on the monotonic
        clock; what runs then is lost.

        keeps: by its place and its process within the wave, whether a trial becomes a record.
        short: a wave of short trials for workers that are free while another one ends a long one.
        """
        # the trials that are missing then are those that come first in the next waves
        for worker in self._workers:
            worker.waiting.clear()
        self._end_long_trials(until, short)
        self._stop_workers(until)
        if self._busy():
            return []
        begin = time.monotonic()
        shown: list[Shown] = []
        with TemporaryDirectory(dir=self._around.folder) as folder:
            running = [self._start(order) for order in self._orders(wave, Path(folder))]
            try:
                while (alive := _alive(running)) and time.monotonic() < until:
                    for each, ended in self._hear(alive, until):
                        if ended is not None and purpose is Purpose.DIAGNOSE:
                            self.spent.diagnosing.append(ended.duration_s)
                        if ended is not None and keeps(ended.index, each.order.number):
                            shown.append(self.trials.add(each, ended, purpose))
            finally:
                self._finish(running)
        unused = len(self._workers) - len(wave.processes)
        self.spent.alone_s += max(0, unused) * (time.monotonic() - begin)
        return shown

    def close(self) -> None:
        """End what runs; it is lost."""
        self._finish(self._busy())
        self._workers.clear()

    def _busy(self) -> list[Running]:
        return [worker.running for worker in self._workers if worker.running]

    def _begin_waiting(self) -> None:
        for worker in self._workers:
            if worker.running is None and worker.waiting:
                conditions, wanted = worker.waiting.popleft()
                folder = Path(mkdtemp(dir=self._around.folder))
                worker.running = self._start(self._order(conditions, wanted, folder, folder))

    def _hear_workers(self, until: float) -> None:
        for each, ended in self._hear(self._busy(), until):
            if ended is not None:
                self._shown.append(self.trials.add(each, ended, Purpose.PLANNED))
        for worker in self._workers:
            if worker.running and worker.running.process.status is not None:
                self._around.processes.forget(worker.running.process)
                shutil.rmtree(worker.running.order.folder, ignore_errors=True)
                worker.running = None

    def _end_long_trials(self, until: float, short: Callable[[], Wave | None]) -> None:
        """Stop the processes that have long trials; the others go on until these have ended."""
        long = [each for each in self._busy() if self._has_long_trials(each)]
        for each in long:
            each.order.stop.touch()
        while (left := [each for each in self._busy() if each in long]) and (
            time.monotonic() < until
        ):
            if max(map(self._rest, left)) > _WORTH_A_START_S:
                self._give_free_workers(short)
            with self._counting_free_workers():
                self._hear_workers(until)

    def _has_long_trials(self, running: Running) -> bool:
        # with an empty cache each compiles its kernels
        return running.order.conditions.cache is Cache.COLD or any(
            self.trials.seconds(wanted) > SHORT_S for wanted in running.left
        )

    def _rest(self, running: Running) -> float:
        """How long the present trial of a process is going to take yet."""
        present = running.left[:1]
        return sum(map(self.trials.seconds, present)) - running.seconds

    def _give_free_workers(self, short: Callable[[], Wave | None]) -> None:
        if len(self._busy()) == len(self._workers):
            return
        wave = short()
        for worker, process in zip(self._workers, wave.processes if wave else (), strict=False):
            if worker.running is None:
                worker.waiting.append(process)
        self._begin_waiting()

    @contextmanager
    def _counting_free_workers(self) -> Iterator[None]:
        free, begin = len(self._workers) - len(self._busy()), time.monotonic()
        yield
        self.spent.alone_s += free * (time.monotonic() - begin)

    def _stop_workers(self, until: float) -> None:
        """Let each end with its present trial."""
        for each in self._busy():
            each.order.stop.touch()
        while self._busy() and time.monotonic() < until:
            with self._counting_free_workers():
                self._hear_workers(until)

    def _start(self, order: Order) -> Running:
        begin = time.monotonic()
        process = self._around.processes.start(order)
        return Running(process, order, next(self._processes), begin)

    def _hear(
        self, running: Sequence[Running], until: float
    ) -> Iterator[tuple[Running, Measured | None]]:
        """What processes say next, and which trial that ends."""
        of = {id(each.process): each for each in running}
        seconds = min(max(0.0, until - time.monotonic()), 1.0)
        for process, message in self._around.processes.hear([r.process for r in running], seconds):
            each = of[id(process)]
            is_first = not each.has_begun
            yield each, each.hear(message)
            if is_first and (each.has_begun or message is None):
                self.spent.starting_s += time.monotonic() - each.started
            if message is None:
                # the others do not wait for it
                each.order.through(each.order.number).touch()

    def _finish(self, running: Sequence[Running]) -> None:
        late = _alive(running)
        for each in late:
            self._around.processes.end(each.process)
        # their folder is removed next
        end = time.monotonic() + 10
        while (left := _alive(late)) and time.monotonic() < end:
            self._around.processes.hear([each.process for each in left], 1.0)
        for each in running:
            self._around.processes.forget(each.process)

    def _orders(self, wave: Wave, folder: Path) -> list[Order]:
        orders = []
        for number, (conditions, wanted) in enumerate(wave.processes):
            own = folder / str(number)
            own.mkdir()
            order = self._order(conditions, wanted, own, folder)
            orders.append(replace(order, number=number, peers=len(wave.processes)))
        return orders

    def _order(
        self, conditions: Conditions, wanted: Sequence[Wanted], folder: Path, wave: Path
    ) -> Order:
        """Of a process that has no peers."""
        return Order(
            steps=tuple(self.trials.step(each) for each in wanted),
            conditions=conditions,
            folder=folder,
            wave=wave,
            number=0,
            peers=1,
            run=self._around.run,
            share=self._around.shares.get(conditions.gpu),
        )


def _alive(running: Sequence[Running]) -> list[Running]:
    return [each for each in running if each.process.status is None]


def alone(wanted: Sequence[Wanted], conditions: Conditions) -> Wave:
    """One process, with as many neighbours of the same trials as its conditions say."""
    each = (conditions, tuple(wanted))
    return Wave(processes=(each,) * (1 + conditions.neighbours))
