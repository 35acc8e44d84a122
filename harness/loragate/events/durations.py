"""How long cases and legs took, from the events of an earlier run. Imports no torch."""

from __future__ import annotations

from collections import defaultdict
from functools import cache
from pathlib import Path

from loragate.events.log import EventsError, read_events
from loragate.events.model import CaseFinished, LegFinished, RunStarted
from loragate.matrix.shards import Durations

_EVENTS = "events.jsonl"


@cache
def durations_of(report: Path | None) -> Durations:
    """Of a report, its folder or its events; none of None. Raises EventsError, a ValueError."""
    if report is None:
        return Durations()
    path = report / _EVENTS if report.is_dir() else report
    events = read_events(path).events
    plans = [event for event in events if isinstance(event, RunStarted)]
    if not plans:
        raise EventsError(f"{path}: holds no run; durations are those of a report")
    cases: defaultdict[str, float] = defaultdict(float)
    cases.update({skip.run_id: 0.0 for plan in plans for skip in plan.skipped})
    legs: defaultdict[str, float] = defaultdict(float)
    for event in events:
        if isinstance(event, CaseFinished):
            cases[event.run_id] += event.duration_s
        elif isinstance(event, LegFinished):
            legs[event.name] += event.duration_s
    of_cases = {row.leg for plan in plans for row in plan.expected if row.run_ids}
    took = sum(legs[name] for name in of_cases)
    # cases run side by side, which the seconds of another leg do not show
    parallel = sum(cases.values()) / took if took else 1.0
    others = {name: s * parallel for name, s in legs.items() if name not in of_cases}
    return Durations(dict(cases), others)
