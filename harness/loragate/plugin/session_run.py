"""A pytest session as a run of its own, or as a leg of a run of the gate.

Invariant: only a session that owns its run moves an earlier report aside, records the plan and
closes the run; a leg of the gate only appends to the events.
"""

from __future__ import annotations

import time
from collections.abc import Collection

import pytest

from loragate.core.verdict import EXIT_CODES, ExitCode, Verdict, worst
from loragate.events.log import EventWriter, read_events
from loragate.events.model import Event, LegFinished, LegStarted
from loragate.matrix.case_run import CaseRun
from loragate.plugin.options import Ownership, Settings
from loragate.report.summary import Summary
from loragate.run.closing import close_run, verdict_on
from loragate.run.folder import clear_folder
from loragate.run.opening import RunRequest
from loragate.run.opening_process import PlanningError, opening_events_of_child

_LEG = "pytest"


class SessionRun:
    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._begin = time.monotonic()
        self.begun = False
        # only for a run of its own, once it has ended
        self.summary: Summary | None = None

    def start(self, runs: Collection[CaseRun]) -> None:
        """Before the first case runs."""
        if self._settings.ownership is Ownership.OWNED:
            self._open(runs)
        self.begun = True

    def finish(self, runs: Collection[CaseRun], *, other_failures: int) -> ExitCode:
        """Judge the collected runs; close a run of its own and write its report.

        other_failures: how much failed in the session besides cases.
        """
        settings = self._settings
        verdict, message = verdict_on(runs, read_events(settings.events)), ""
        if other_failures:
            noun = "failure" if other_failures == 1 else "failures"
            verdict = worst([verdict, Verdict.FAIL])
            message = f"{other_failures} {noun} outside of the cases, reported by pytest"
        exit_code = EXIT_CODES[verdict]
        if settings.ownership is Ownership.JOINED:
            return exit_code
        duration_s = time.monotonic() - self._begin
        self._write(
            LegFinished(
                name=_LEG,
                verdict=verdict,
                exit_code=exit_code.value,
                duration_s=duration_s,
                message=message,
            )
        )
        self.summary = close_run(settings.report, run=settings.run, duration_s=duration_s)
        return self.summary.exit_code

    def _open(self, runs: Collection[CaseRun]) -> None:
        try:
            opening = opening_events_of_child(
                RunRequest(
                    run=self._settings.run,
                    selection=self._settings.selection,
                    leg=_LEG,
                    legs=(_LEG,),
                    only=frozenset(run.run_id for run in runs),
                )
            )
        except PlanningError as error:
            pytest.exit(str(error), returncode=error.exit_code.value)
        clear_folder(self._settings.report)
        for event in (*opening, LegStarted(name=_LEG)):
            self._write(event)

    def _write(self, event: Event) -> None:
        with EventWriter(self._settings.events, run=self._settings.run) as writer:
            writer.write(event)
