"""Cases that never ended, and the verdict of a session. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from loragate.core.verdict import Verdict, worst
from loragate.events.log import EventLog
from loragate.events.model import CaseFinished, CaseStarted, RunStarted
from loragate.matrix.case_run import CaseRun
from loragate.matrix.replay_command import replay_command
from loragate.report.outcomes import case_outcomes


def abandoned_cases(log: EventLog, *, leg: str, why: str) -> Iterator[CaseFinished]:
    """An inconclusive end for each case of `leg` that was running when the leg was stopped."""
    ended = {(e.run_id, e.trial) for e in log.events if isinstance(e, CaseFinished)}
    owners = {
        run_id: expected
        for event in log.events
        if isinstance(event, RunStarted)
        for expected in event.expected
        if expected.leg == leg
        for run_id in expected.run_ids
    }
    starts = [event for event in log.events if isinstance(event, CaseStarted)]
    for start in starts:
        if (start.run_id, start.trial) in ended or start.run_id not in owners:
            continue
        owner = owners[start.run_id]
        yield CaseFinished(
            run_id=start.run_id,
            subject=owner.subject,
            site=owner.site,
            draw=start.draw,
            repeat=start.repeat,
            seed=start.seed,
            worker=start.worker,
            verdict=Verdict.INCONCLUSIVE,
            judgements=(),
            duration_s=0.0,
            replay=start.replay or replay_command(start.run_id, *start.trial),
            message=why,
        )


def verdict_on(runs: Collection[CaseRun], log: EventLog) -> Verdict:
    """The verdict of these runs: PASS only if each of them was judged and passed.

    Cases that the plan left out do not count, and where it left out all of them nothing was judged.
    """
    plans = [event for event in log.events if isinstance(event, RunStarted)]
    left_out = {skip.run_id for plan in plans for skip in plan.skipped}
    expected = {(run.run_id, (run.draw, run.repeat)) for run in runs if run.run_id not in left_out}
    names = {run_id for run_id, _ in expected}
    ended = {(e.run_id, e.trial) for e in log.events if isinstance(e, CaseFinished)}
    verdicts = [case.verdict for case in case_outcomes(log.events) if case.run_id in names]
    # what one shard has nothing to judge of, others may
    is_idle = not expected and not any(plan.shard for plan in plans)
    # an expected case that was skipped is as good as missing
    if expected - ended or Verdict.SKIP in verdicts or is_idle:
        verdicts.append(Verdict.INCONCLUSIVE)
    return worst([verdict for verdict in verdicts if verdict is not Verdict.SKIP] or [Verdict.PASS])
