"""The end of a run: judge it from its events and write the reports for people and machines."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from loragate.environment import utc_now
from loragate.folder import EVENTS
from loragate.report.events import CaseFinished, RunFinished, RunStarted
from loragate.report.log import EventLog, EventWriter, read_events
from loragate.report.outcomes import case_outcomes
from loragate.report.summary import Summary, summarize
from loragate.selection import CaseRun
from loragate.verdict import Verdict, worst


def close_run(report: Path, *, run: str, duration_s: float) -> Summary:
    """Append the end to `report`'s events and write every other file of the report from them."""
    events = report / EVENTS
    with EventWriter(events, run=run) as writer:
        writer.write(RunFinished(finished_at=utc_now(), duration_s=duration_s))
    return summarize(read_events(events))


def verdict_on(runs: Collection[CaseRun], log: EventLog) -> Verdict:
    """The verdict of these attempts: PASS only if each of them was judged and passed.

    What the plan left out owes nothing.
    """
    left_out = {
        skip.run_id
        for event in log.events
        if isinstance(event, RunStarted)
        for skip in event.skipped
    }
    owed = {(run.run_id, run.attempt) for run in runs if run.run_id not in left_out}
    names = {run_id for run_id, _ in owed}
    ended = {(e.run_id, e.attempt) for e in log.events if isinstance(e, CaseFinished)}
    verdicts = [case.verdict for case in case_outcomes(log.events) if case.run_id in names]
    # a case that the plan counts on and that was skipped is as good as missing
    if owed - ended or Verdict.SKIP in verdicts:
        verdicts.append(Verdict.INCONCLUSIVE)
    return worst([verdict for verdict in verdicts if verdict is not Verdict.SKIP] or [Verdict.PASS])
