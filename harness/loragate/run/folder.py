"""The folder of a report. Invariant: what an earlier run left is moved aside, never deleted."""

from __future__ import annotations

import json
from pathlib import Path

from loragate.report.write import HTML_NAME, JUNIT_NAME

EVENTS = "events.jsonl"
# logs of the gate's legs, stacks of workers
LOGS = "logs"
WORKERS = "workers"
_PREVIOUS = "previous"
# whatever else lies in the folder is not ours to move
_OURS = (EVENTS, JUNIT_NAME, HTML_NAME, LOGS, WORKERS)


def clear_folder(report: Path) -> None:
    """Make room for a new run in `report`, which need not exist."""
    left = [report / name for name in _OURS if (report / name).exists()]
    if left:
        attic = _attic(report)
        attic.mkdir(parents=True)
        for path in left:
            path.rename(attic / path.name)
    report.mkdir(parents=True, exist_ok=True)


def _attic(report: Path) -> Path:
    name = _run_name(report / EVENTS) or "unnamed"
    attic = report / _PREVIOUS / name
    number = 1
    while attic.exists():
        number += 1
        attic = report / _PREVIOUS / f"{name}.{number}"
    return attic


def _run_name(events: Path) -> str | None:
    try:
        with events.open(encoding="utf-8", errors="replace") as file:
            name = json.loads(file.readline())["run"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return name if isinstance(name, str) and name.isprintable() and "/" not in name else None
