"""The folder of a report. Invariant: files of an earlier run are moved aside, never deleted."""

from __future__ import annotations

import json
from pathlib import Path

from loragate.report.write import HTML_NAME, JUNIT_NAME

EVENTS = "events.jsonl"
# logs of the gate's legs, stacks of workers
LOGS = "logs"
WORKERS = "workers"
_PREVIOUS = "previous"
# other files in the folder belong to somebody else and stay
_OURS = (EVENTS, JUNIT_NAME, HTML_NAME, LOGS, WORKERS)


def clear_folder(report: Path) -> None:
    """Move an earlier report in `report` to an archive folder; `report` need not exist."""
    left = [report / name for name in _OURS if (report / name).exists()]
    if left:
        archive = _archive_folder(report)
        archive.mkdir(parents=True)
        for path in left:
            path.rename(archive / path.name)
    report.mkdir(parents=True, exist_ok=True)


def _archive_folder(report: Path) -> Path:
    name = _run_name(report / EVENTS) or "unnamed"
    archive = report / _PREVIOUS / name
    number = 1
    while archive.exists():
        number += 1
        archive = report / _PREVIOUS / f"{name}.{number}"
    return archive


def _run_name(events: Path) -> str | None:
    try:
        with events.open(encoding="utf-8", errors="replace") as file:
            name = json.loads(file.readline())["run"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return name if isinstance(name, str) and name.isprintable() and "/" not in name else None
