"""Reports of shards, and whether they are parts of one run. Pure; imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from loragate.events.log import EventLog
from loragate.events.model import (
    KnownFinding,
    RunFinished,
    RunStarted,
    Sharding,
    ShardPart,
)

# of the plan: where they differ, the shards are not parts of one run
_SAME = ("commit", "tier", "subjects", "draws", "repeats", "patterns", "matrix", "judged")


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


def check_same(reports: Sequence[ShardReport]) -> None:
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


def check_findings(reports: Sequence[ShardReport]) -> None:
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


def gaps(reports: Sequence[ShardReport]) -> Iterator[str]:
    """The shards of the run that are missing or did not come to their end."""
    count = reports[0].sharding.count
    given = {report.sharding.index for report in reports}
    for index in range(1, count + 1):
        if index not in given:
            yield f"shard {index}/{count} is missing: no report of it was given"
    for report in reports:
        if not any(isinstance(event, RunFinished) for event in report.log.events):
            shard = f"shard {report.sharding.index}/{count}"
            yield f"{shard} did not come to its end ({report.name})"


def check_one_record(reports: Sequence[ShardReport]) -> None:
    """MergeError unless the shards may be recorded as one run of all cases on one kind of
    machine."""
    first = reports[0]
    if first.plan.patterns:
        raise MergeError(
            "--record takes every case; the shards were run with "
            f"--cases {' --cases '.join(first.plan.patterns)}"
        )
    if first.plan.draws != tuple(range(max(1, len(first.plan.draws)))):
        raise MergeError(
            f"--record takes draws from 0 on; the shards have {_shown(first.plan.draws)}"
        )
    for report in reports:
        for what, ours, theirs in (
            ("versions", first.plan.versions, report.plan.versions),
            ("device_name", *(one.plan.machine.get("device_name") for one in (first, report))),
        ):
            if ours != theirs:
                raise MergeError(
                    f"--record takes one machine: {what} of {first.name} and {report.name} differ"
                )


def check_once(reports: Sequence[ShardReport]) -> None:
    found: dict[int, ShardReport] = {}
    for report in reports:
        index = report.sharding.index
        if index in found:
            both = f"{found[index].name} and {report.name}"
            raise MergeError(f"{both} are both shard {index}/{report.sharding.count}")
        found[index] = report


def whole_plan(plan: RunStarted) -> Mapping[int, ShardPart]:
    """What every shard has to deliver, as one of them has planned it."""
    assert plan.shard is not None
    own = ShardPart(index=plan.shard.index, legs=plan.legs, expected=plan.expected)
    return {part.index: part for part in (own, *plan.shard.others)}


def check_plan(
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


def _shown(value: object) -> str:
    if isinstance(value, tuple):
        return ", ".join(map(str, value)) or "none"
    return str(value) or "none"
