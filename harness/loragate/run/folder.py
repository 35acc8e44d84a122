"""The folder of a report.

Invariants: files of an earlier run are moved aside, never deleted; one run at a time writes there.
"""

from __future__ import annotations

import json
from contextlib import AbstractContextManager
from pathlib import Path

from filelock import FileLock, Timeout

from loragate.core.errors import CommandError
from loragate.core.verdict import ExitCode
from loragate.events.log import read_events
from loragate.events.model import RunStarted
from loragate.report.write import HTML_NAME, JUNIT_NAME

EVENTS = "events.jsonl"
# logs of the gate's legs, stacks of workers
LOGS = "logs"
WORKERS = "workers"
_PREVIOUS = "previous"
_LOCK = ".lock"
# other files in the folder belong to somebody else and stay
_OURS = (EVENTS, JUNIT_NAME, HTML_NAME, LOGS, WORKERS)


def hold_folder(report: Path) -> AbstractContextManager[object]:
    """Keep every other run out of `report` until the returned context ends, or this process.

    The folder is made; what it holds stays. Raises CommandError if a run has it already, or nothing
    can be written there.
    """
    try:
        report.mkdir(parents=True, exist_ok=True)
        # in the folder itself, which may lie on a disk that several machines share
        return FileLock(report / _LOCK).acquire(blocking=False)
    except Timeout as error:
        name = _run_name(report / EVENTS) or "another run"
        message = f"report folder {report}: {name} is writing there; wait for it, or name another"
        raise CommandError(message, ExitCode.USAGE) from error
    except (FileExistsError, NotADirectoryError) as error:
        message = f"report folder {report}: there is a file in its place; name a folder"
        raise CommandError(message, ExitCode.USAGE) from error
    except (OSError, NotImplementedError) as error:
        message = f"report folder {report}: cannot be written: {error}"
        raise CommandError(message, ExitCode.INFRASTRUCTURE) from error


def check_durations(durations: Path | None, report: Path) -> None:
    """Raises ValueError for recorded durations that `clear_folder(report)` would move away before
    every process of the run has read them."""
    if durations is None:
        return
    resolved = durations.resolve()
    if report.resolve() in (resolved, resolved.parent):
        raise ValueError(
            f"durations {durations}: lie in the report folder of this run, which is cleared; "
            "name another folder for the report"
        )


def check_run(report: Path, run: str) -> None:
    """Raises ValueError if `report` holds no plan of a run of that name, which others may join."""
    log = read_events(report / EVENTS, run=run)
    if not any(isinstance(event, RunStarted) for event in log.events):
        raise ValueError(f"report folder {report}: has no plan of a run {run!r} to append to")


def clear_folder(report: Path) -> None:
    """Move an earlier report in `report` to an archive folder; `report` need not exist.

    Raises CommandError.
    """
    left = [report / name for name in _OURS if (report / name).exists()]
    try:
        if left:
            archive = _archive_folder(report)
            archive.mkdir(parents=True)
            for path in left:
                path.rename(archive / path.name)
        report.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        message = f"report folder {report}: an earlier report cannot be moved aside: {error}"
        raise CommandError(message, ExitCode.INFRASTRUCTURE) from error


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
