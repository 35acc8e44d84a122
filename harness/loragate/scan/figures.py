"""What one scan did and found, in numbers: for a record, and as a row of docs/nightly.md. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from loragate.history import Purpose, ScanRun, TrialRecord
from loragate.history.model import JUDGED
from loragate.nightly.states import GroupKey, Status
from loragate.nightly.wave import Measure

SECTION = "scan"

# of the time of a scan beyond that of its trials
MOST_OVERHEAD = 0.1
# parts of the overhead, each with its column; `other`: what nothing else accounts for
_PARTS = ("opening", "starting", "alone", "other")
_COLUMNS = (
    *("machine", "budget", "cases", "judged", "trials"),
    *(*Status, "overhead", *_PARTS, "commit"),
)


def figures_of(
    run: ScanRun,
    own: Sequence[TrialRecord],
    statuses: Mapping[GroupKey, Status],
    *,
    cases: int,
    workers: int,
    seconds: float,
    spent: Mapping[str, float],
    diagnosing: Sequence[float],
) -> dict[str, Any]:
    """own: the records of `run`: planned trials, and what diagnoses concluded. statuses: of all
    paths, of which those are counted that `run` has tried. `cases` were selected; `workers`
    processes could run beside each other for `seconds`. spent: seconds of all workers in which no
    trial ran, by what they were spent on; what is missing there is `other`. diagnosing: the seconds
    of each trial of a diagnosis."""
    paths = {trial.path for trial in own}
    found = Counter(status for key, status in statuses.items() if key.path in paths)
    planned = [trial for trial in own if trial.purpose is Purpose.PLANNED]
    busy = sum(trial.duration_s for trial in planned) + sum(diagnosing)
    return {
        "budget_s": run.budget_s,
        "seconds": round(seconds, 1),
        "workers": workers,
        "cases": {
            "selected": cases,
            "tried": len({trial.case for trial in own}),
            "judged": len(
                {t.case for t in own if t.measure == Measure.JUDGED and t.outcome in JUDGED}
            ),
        },
        "trials": {
            Purpose.PLANNED.value: len(planned),
            Purpose.DIAGNOSE.value: len(diagnosing),
        },
        "paths": {status.value: found[status] for status in Status},
        "busy_s": round(busy, 1),
        "spent_s": {
            **{name: round(value, 1) for name, value in spent.items()},
            "other": round(workers * seconds - busy - sum(spent.values()), 1),
        },
        "overhead": round(workers * seconds / busy - 1, 4) if busy else None,
    }


def table(sections: Mapping[str, Mapping[str, Any] | None]) -> str:
    """A row for each recorded scan; the keys of `sections` name the machines."""
    lines = [f"| {' | '.join(_COLUMNS)} |", "| --- |" + " --: |" * (len(_COLUMNS) - 1)]
    rows = [_row(machine, section) for machine, section in sections.items() if section]
    return "\n".join([*lines, *rows]) if rows else "Not recorded yet."


def _row(machine: str, section: Mapping[str, Any]) -> str:
    cases, overhead = section["cases"], section["overhead"]
    cells = [
        machine,
        f"{section['budget_s'] / 60:g} min",
        f"{cases['tried']} of {cases['selected']}",
        # not in older records
        str(cases.get("judged", "-")),
        str(section["trials"].get(Purpose.PLANNED.value, 0)),
        *(str(section["paths"][status.value]) for status in Status),
        "-"
        if overhead is None
        else f"{overhead:.0%}{'' if overhead <= MOST_OVERHEAD else ' (missed)'}",
        *(_part(section, name) for name in _PARTS),
        section["commit"][:7],
    ]
    return f"| {' | '.join(cells)} |"


def _part(section: Mapping[str, Any], name: str) -> str:
    """A part of the overhead; "-" in records that do not take it apart."""
    spent, busy = section.get("spent_s", {}).get(name), section["busy_s"]
    return f"{spent / busy:.1%}" if busy and spent is not None else "-"
