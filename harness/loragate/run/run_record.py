"""The record of one run in the process that judges it: its events, then its pages.

Invariant: a disk that is full, or a folder that has gone, costs neither the events that this
process knows nor the verdict. The run is then no better than INFRA, and says why.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from loragate.core.versions import utc_now
from loragate.events.log import EventLog, EventsError, EventWriter, read_events
from loragate.events.model import Event, RunFinished
from loragate.report.summary import Summary, summarize
from loragate.report.write import append_step_summary, write_pages
from loragate.run.folder import EVENTS


class RunRecord:
    """The events of `run` in the folder `report`; workers append to the same file themselves."""

    def __init__(self, report: Path, *, run: str) -> None:
        self._report = report
        self._run = run
        self._kept: list[Event] = []
        self._problems: dict[str, None] = {}

    @property
    def is_whole(self) -> bool:
        """Whether everything could be recorded so far."""
        return not self._problems

    def note_problem(self, text: str) -> None:
        """Something could not be recorded, as one sentence."""
        self._problems[text] = None

    def write(self, events: Iterable[Event]) -> None:
        """Append to the file; what it does not take is kept in memory and judged all the same."""
        left = list(events)
        try:
            with EventWriter(self._report / EVENTS, run=self._run) as writer:
                while left:
                    writer.write(left[0])
                    del left[0]
        except OSError as error:
            self._kept += left
            self.note_problem(unwritten(self._report / EVENTS, error))

    def read(self) -> EventLog:
        """What all processes have recorded about this run so far, and no other run's events."""
        try:
            log = read_events(self._report / EVENTS, run=self._run)
        except EventsError as error:
            self.note_problem(str(error))
            log = EventLog(())
        return log.with_events(self._kept)

    def close(self, *, duration_s: float) -> Summary:
        """Record the end of the run, judge it, and write its pages."""
        self.write([RunFinished(finished_at=utc_now(), duration_s=duration_s)])
        log = self.read()
        summary = summarize(log, problems=tuple(self._problems))
        try:
            write_pages(summary, self._report)
        except OSError as error:
            self.note_problem(unwritten(self._report, error))
            summary = summarize(log, problems=tuple(self._problems))
        append_step_summary(summary, self._report, os.environ)
        return summary


def unwritten(path: Path, error: OSError) -> str:
    """The sentence about a path that cannot be written."""
    return f"{path}: cannot be written: {error.strerror or error}"
