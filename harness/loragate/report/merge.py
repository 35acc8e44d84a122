"""The events of a run's shards as those of one run. Pure; imports no torch.

Invariant: the merged run expects what the whole plan expects, which each shard has recorded. A
shard that is missing, or was killed, therefore leaves its cases and legs missing, and the run does
not pass.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from loragate.core.checkout import Tree
from loragate.events.log import EventLog
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
    Sharding,
    ShardPart,
)

# of the plan: where they differ, the shards are not parts of one run
_SAME = ("commit", "tier", "subjects", "draws", "repeats", "judged")


class MergeError(ValueError):
    """Reports that are not parts of one run; the message names them and says why."""


@dataclass(frozen=True, slots=True)
class ShardReport:
    """One report as it was given; `name` is what messages call it, `logs` where the merged report
    keeps its logs."""

    name: str
    log: EventLog
    logs: str

    @property
    def plan(self) -> RunStarted:
        """Raises MergeError."""
        plans = [event for event in self.log.events if isinstance(event, RunStarted)]
        if not plans:
            raise MergeError(f"{self.name}: no plan is recorded")
        return plans[0]

    @property
    def sharding(self) -> Sharding:
        """Raises MergeError."""
        if self.plan.shard is None:
            raise MergeError(f"{self.name}: is no shard: it was run without --shard")
        return self.plan.shard


def merged_events(reports: Sequence[ShardReport], *, run: str) -> tuple[Event, ...]:
    """The events of one run, called `run`. Raises MergeError."""
    _check_same(reports)
    _check_findings(reports)
    by_index = _by_index(reports)
    first = reports[0]
    plan = _whole_plan(first.plan)
    for report in reports[1:]:
        _check_plan(first.name, plan, report.name, _whole_plan(report.plan))
    shared = _shared_legs(plan)
    return (
        _merged_plan(plan, reports, shared, run=run),
        *_notes(reports, sorted(plan.keys() - by_index.keys()), len(plan)),
        *_known_findings(reports),
        *(event for report in reports for event in _events_of(report, shared)),
        *_end(reports),
    )


def _check_same(reports: Sequence[ShardReport]) -> None:
    first = reports[0]
    for report in reports:
        if report.sharding.count != first.sharding.count:
            raise MergeError(
                f"{first.name} is one of {first.sharding.count} shards, "
                f"{report.name} one of {report.sharding.count}"
            )
        for field in _SAME:
            ours, theirs = getattr(first.plan, field), getattr(report.plan, field)
            if ours != theirs:
                raise MergeError(
                    f"{field} differs: {_shown(ours)} in {first.name}, "
                    f"{_shown(theirs)} in {report.name}"
                )


def _check_findings(reports: Sequence[ShardReport]) -> None:
    """MergeError for a finding whose versions are those of some shards and not of others: merged
    results do not tell which version they are of."""
    sides: dict[bool, dict[tuple[str, str], tuple[str, KnownFinding]]] = {True: {}, False: {}}
    for report in reports:
        for event in report.log.events:
            if isinstance(event, KnownFinding):
                key = event.finding.id, event.finding.subject
                is_listed = event.finding.covers(event.version)
                sides[is_listed].setdefault(key, (report.name, event))
    for key in sorted(sides[True].keys() & sides[False].keys()):
        (here, listed), (there, other) = sides[True][key], sides[False][key]
        raise MergeError(
            f"finding {key[0]} is listed for version {_shown(listed.version)} in {here}, "
            f"and not for {_shown(other.version)} in {there} ({other.finding.versions}): "
            "it would excuse failures of both"
        )


def _by_index(reports: Sequence[ShardReport]) -> Mapping[int, ShardReport]:
    found: dict[int, ShardReport] = {}
    for report in reports:
        index = report.sharding.index
        if index in found:
            both = f"{found[index].name} and {report.name}"
            raise MergeError(f"{both} are both shard {index}/{report.sharding.count}")
        found[index] = report
    return found


def _whole_plan(plan: RunStarted) -> Mapping[int, ShardPart]:
    """What every shard has to deliver, as one of them has planned it."""
    assert plan.shard is not None
    own = ShardPart(index=plan.shard.index, legs=plan.legs, expected=plan.expected)
    return {part.index: part for part in (own, *plan.shard.others)}


def _check_plan(
    name: str, plan: Mapping[int, ShardPart], other_name: str, other: Mapping[int, ShardPart]
) -> None:
    """MergeError that names a case or a leg which two shards have planned for different shards."""
    ours, theirs = _places(plan), _places(other)
    for what in sorted(ours.keys() | theirs.keys()):
        here, there = ours.get(what), theirs.get(what)
        if here != there:
            raise MergeError(
                f"the plans differ: {what} is in {_place(here)} by {name}, "
                f"in {_place(there)} by {other_name}; were other durations or cases given?"
            )


def _places(plan: Mapping[int, ShardPart]) -> dict[str, tuple[int, ...]]:
    """The shards of each case and of each leg."""
    found: dict[str, tuple[int, ...]] = {}
    for index, part in sorted(plan.items()):
        names = [name for row in part.expected for name in row.run_ids]
        for name in (*names, *(f"leg {leg}" for leg in part.legs)):
            found[name] = (*found.get(name, ()), index)
    return found


def _place(indices: tuple[int, ...] | None) -> str:
    return f"shard {', '.join(map(str, indices))}" if indices else "no shard"


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
    dirty = [found.tree for found in plans if found.tree is not Tree.CLEAN]
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
        tree=dirty[0] if dirty else Tree.CLEAN,
        shard=None,
    )


def _expected(row: Expected, index: int, shared: frozenset[str]) -> Expected:
    return replace(row, leg=_leg_name(row.leg, index, shared))


def _notes(reports: Sequence[ShardReport], missing: Sequence[int], count: int) -> Iterator[Note]:
    for index in missing:
        yield Note(text=f"shard {index}/{count} is missing: no report of it was given")
    for report in reports:
        shard = f"shard {report.sharding.index}/{count}"
        if not any(isinstance(event, RunFinished) for event in report.log.events):
            yield Note(text=f"{shard} did not come to its end ({report.name})")
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


def _shown(value: object) -> str:
    if isinstance(value, tuple):
        return ", ".join(map(str, value)) or "none"
    return str(value) or "none"
