"""The events of a run's shards as those of one run. Pure; imports no torch.

Invariant: the merged run expects what the whole plan expects, which each shard has recorded. A
shard that is missing, or was killed, therefore leaves its cases and legs missing, and the run does
not pass.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from loragate.core.checkout import Tree
from loragate.events.model import (
    CaseFinished,
    CaseStarted,
    Event,
    Expected,
    HostTestFinished,
    HostTestsCollected,
    KnownFinding,
    LegFinished,
    LegStarted,
    Note,
    RunFinished,
    RunStarted,
    ShardPart,
)
from loragate.report.shard_reports import (
    ShardReport,
    check_findings,
    check_once,
    check_plan,
    check_same,
    gaps,
    whole_plan,
)


def merged_events(reports: Sequence[ShardReport], *, run: str) -> tuple[Event, ...]:
    """The events of one run, called `run`. Raises MergeError."""
    check_same(reports)
    check_findings(reports)
    check_once(reports)
    first = reports[0]
    plan = whole_plan(first.plan)
    for report in reports[1:]:
        check_plan(first.name, plan, report.name, whole_plan(report.plan))
    shared = _shared_legs(plan)
    return (
        _merged_plan(plan, reports, shared, run=run),
        *_notes(reports),
        *_known_findings(reports),
        *(event for report in reports for event in _events_of(report, shared)),
        *_end(reports),
    )


def _shared_legs(plan: Mapping[int, ShardPart]) -> frozenset[str]:
    """Legs that several shards have, so that their names do not tell them apart."""
    tally = Counter(leg for part in plan.values() for leg in part.legs)
    return frozenset(leg for leg, number in tally.items() if number > 1)


def _leg_name(leg: str, index: int, shared: frozenset[str]) -> str:
    return f"{leg} {index}" if leg in shared else leg


def _merged_plan(
    plan: Mapping[int, ShardPart],
    reports: Sequence[ShardReport],
    shared: frozenset[str],
    *,
    run: str,
) -> RunStarted:
    plans = [report.plan for report in reports]
    trees = {found.tree for found in plans}
    parts = [plan[index] for index in sorted(plan)]
    return replace(
        plans[0],
        run=run,
        started_at=min(found.started_at for found in plans),
        legs=tuple(_leg_name(leg, part.index, shared) for part in parts for leg in part.legs),
        expected=tuple(
            _expected(row, part.index, shared) for part in parts for row in part.expected
        ),
        skipped=tuple(skip for found in plans for skip in found.skipped),
        tree=next((tree for tree in (Tree.DIRTY, Tree.UNKNOWN) if tree in trees), Tree.CLEAN),
        shard=None,
    )


def _expected(row: Expected, index: int, shared: frozenset[str]) -> Expected:
    return replace(row, leg=_leg_name(row.leg, index, shared))


def _notes(reports: Sequence[ShardReport]) -> Iterator[Note]:
    yield from (Note(text=text) for text in gaps(reports))
    for report in reports:
        shard = f"shard {report.sharding.index}/{report.sharding.count}"
        yield from (Note(text=f"{shard}: {text}") for text in report.log.left_out)
        if report.plan.tree is Tree.DIRTY and len(reports) > 1:
            yield Note(text=f"{shard} had local changes, which others may not have had")
    for field in ("versions", "machine"):
        yield from _differences(reports, field)


def _differences(reports: Sequence[ShardReport], field: str) -> Iterator[Note]:
    """Notes about packages or parts of the machine that are not the same for all shards."""
    found = [getattr(report.plan, field) for report in reports]
    for key in sorted({key for values in found for key in values}):
        # the path of the interpreter says nothing
        if key != "executable" and len({values.get(key) for values in found}) > 1:
            shown = ", ".join(
                f"{values.get(key, 'none')} in shard {report.sharding.index}"
                for report, values in zip(reports, found, strict=True)
            )
            yield Note(text=f"{key} differs: {shown}")


def _known_findings(reports: Sequence[ShardReport]) -> tuple[KnownFinding, ...]:
    events = (event for report in reports for event in report.log.events)
    found: list[KnownFinding] = []
    for event in events:
        if isinstance(event, KnownFinding) and event not in found:
            found.append(event)
    return tuple(found)


def _events_of(report: ShardReport, shared: frozenset[str]) -> Iterator[Event]:
    """The events of a shard, with names that say which shard it was."""
    index = report.sharding.index
    for event in report.log.events:
        match event:
            case RunStarted() | RunFinished() | KnownFinding():
                continue
            case Note():
                yield Note(text=f"shard {index}: {event.text}")
            case LegStarted():
                yield replace(event, name=_leg_name(event.name, index, shared))
            case LegFinished():
                log = event.log_path and f"{report.logs}/{event.log_path}"
                yield replace(event, name=_leg_name(event.name, index, shared), log_path=log)
            case CaseStarted() | CaseFinished():
                yield replace(event, worker=f"{index}/{event.worker}")
            case HostTestsCollected() | HostTestFinished():
                yield replace(event, leg=_leg_name(event.leg, index, shared))
            case _:
                yield event


def _end(reports: Sequence[ShardReport]) -> Iterator[RunFinished]:
    """The end of a run whose shards have all ended; as long as the longest of them."""
    ends = [event for r in reports for event in r.log.events if isinstance(event, RunFinished)]
    if len(ends) == len(reports):
        yield RunFinished(
            finished_at=max(end.finished_at for end in ends),
            duration_s=max(end.duration_s for end in ends),
        )
