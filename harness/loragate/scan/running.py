"""A process of a scan that runs: which of its trials has ended, and what its end says of them."""

from __future__ import annotations

import time

from loragate.core.child_process import signal_name
from loragate.core.verdict import Failure
from loragate.history import Outcome
from loragate.nightly.conditions import Clock
from loragate.nightly.wave import Wanted
from loragate.plugin.crash_report import crash_report
from loragate.scan.messages import Began, Measured, Message, Order
from loragate.scan.processes import Process

# ids that a crash report names
_BEFORE_SHOWN = 5


class Running:
    """A process: what it was heard of last. `number`: its number in the history."""

    def __init__(self, process: Process, order: Order, number: int, started: float) -> None:
        """started: on the monotonic clock, before the process."""
        self.process, self.order, self.number = process, order, number
        self.started = self._begin = started
        # whether it has begun a trial
        self.has_begun = False
        # what it runs on, once it has begun a trial
        self.device = ""
        self._began: int | None = None
        self._ended = 0
        # how many trials have ended
        self._through = 0
        # the trials of the process, in their order. Listed once: they may be thousands, and each of
        # them is looked up when it ends
        self.wanted = tuple(
            Wanted(case=step.run.run_id, draw=step.run.draw, measure=step.measure)
            for step in order.steps
        )

    @property
    def left(self) -> tuple[Wanted, ...]:
        """The trials that have not ended."""
        return self.wanted[self._through :]

    @property
    def seconds(self) -> float:
        """Since the begin of the present trial, or of the process."""
        return time.monotonic() - self._begin

    def hear(self, message: Message | None) -> Measured | None:
        """The end of a trial: told by its process, or with the process itself."""
        if isinstance(message, Began):
            self._began, self._begin, self.has_begun = message.index, time.monotonic(), True
            self.device = message.device
            return None
        if message is not None:
            self._began, self._ended = None, message.index
            self._through = message.index + 1
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
        # code that waits by the clock may have all reason to
        is_late = end.failure is Failure.HANG and self.order.conditions.clock is not Clock.PLAIN
        return Measured(
            index=index,
            outcome=Outcome.UNKNOWN if is_late else Outcome.WRONG,
            failure=end.failure.value if end.failure else "",
            message=end.message,
            digests=(),
            duration_s=end.duration_s,
            promised=True,
        )
