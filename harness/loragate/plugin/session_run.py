"""A pytest session as a run of its own, or as a leg of a run of the gate.

Invariant: only a session that owns its run moves an earlier report aside, records the plan and
closes the run; a leg of the gate only appends to the events.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from contextlib import ExitStack

import pytest

from loragate.core.errors import CommandError
from loragate.core.verdict import EXIT_CODES, ExitCode, Verdict, worst
from loragate.events.model import KnownFinding, LegFinished, LegStarted, ShardPart
from loragate.matrix.case_run import CaseRun
from loragate.plugin.options import Ownership, Role, Settings
from loragate.report.summary import Summary
from loragate.run.closing import abandoned_cases, verdict_on
from loragate.run.folder import clear_folder, hold_folder
from loragate.run.opening import RunRequest
from loragate.run.opening_process import opening_events_here, opening_events_of_child
from loragate.run.run_record import RunRecord

_LEG = "pytest"
INTERRUPTED = "interrupted"


class SessionRun:
    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.record = RunRecord(settings.report, run=settings.run)
        self._held = ExitStack()
        self._begin = time.monotonic()
        self.begun = False
        # only for a run of its own, once it has ended
        self.summary: Summary | None = None

    def start(self, runs: Collection[CaseRun]) -> None:
        """Before the first case runs."""
        if self._settings.ownership is Ownership.OWNED:
            self._open(runs)
        self.begun = True

    def finish(self, runs: Collection[CaseRun], *, other_failures: int, stopped: str) -> ExitCode:
        """Judge the collected runs; close a run of its own and write its report.

        other_failures: how much failed in the session besides cases.
        stopped: why the session ended before its tests did, by Ctrl-C for instance.
        """
        settings = self._settings
        if stopped:
            self.record.write(abandoned_cases(self.record.read(), leg=_LEG, why=stopped))
        verdict = verdict_on(runs, self.record.read())
        message = stopped
        if stopped:
            verdict = worst([verdict, Verdict.INCONCLUSIVE])
        if other_failures:
            noun = "failure" if other_failures == 1 else "failures"
            verdict = worst([verdict, Verdict.FAIL])
            message = f"{other_failures} {noun} outside of the cases, reported by pytest"
        if not self.record.is_whole:
            verdict = worst([verdict, Verdict.INFRA])
        exit_code = EXIT_CODES[verdict]
        if settings.ownership is Ownership.JOINED:
            return exit_code
        duration_s = time.monotonic() - self._begin
        leg = LegFinished(
            name=_LEG,
            verdict=verdict,
            exit_code=exit_code.value,
            duration_s=duration_s,
            message=message,
        )
        self.record.write([leg])
        self.summary = self.record.close(duration_s=duration_s)
        self._held.close()
        return self.summary.exit_code

    def _open(self, runs: Collection[CaseRun]) -> None:
        request = RunRequest(
            run=self._settings.run,
            selection=self._settings.selection,
            leg=_LEG,
            legs=(_LEG,),
            only=frozenset(run.run_id for run in runs),
            other_shards=self._other_shards(),
        )
        alone = self._settings.role is Role.ALONE
        plan = opening_events_here if alone else opening_events_of_child
        try:
            opening = plan(request)
            self._held.enter_context(hold_folder(self._settings.report))
            clear_folder(self._settings.report)
        except CommandError as error:
            pytest.exit(str(error), returncode=error.exit_code.value)
        if not self._settings.excuses:
            # the tests and the verdict of the run both go by these events
            opening = tuple(event for event in opening if not isinstance(event, KnownFinding))
        self.record.write([*opening, LegStarted(name=_LEG)])

    def _other_shards(self) -> tuple[ShardPart, ...]:
        shard = self._settings.selection.shard
        if shard is None:
            return ()
        indices = (index for index in range(1, shard.count + 1) if index != shard.index)
        return tuple(ShardPart(index=index, legs=(_LEG,), expected=()) for index in indices)
