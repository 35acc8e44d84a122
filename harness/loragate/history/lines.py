"""A history as lines of JSON, for machines that share no database."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, fields
from itertools import chain
from pathlib import Path
from typing import Any

from loragate.history import tables
from loragate.history.model import PathFiles, ScanRun, TrialRecord
from loragate.history.store import History, HistoryError

_SCHEMA = "schema"
_KIND = "kind"
_RUN, _PATH, _TRIAL = "run", "path", "trial"

Record = ScanRun | PathFiles | TrialRecord


def export_lines(history: History) -> Iterator[str]:
    """The schema, then all runs, paths and trials, the oldest first; one JSON object a line."""
    yield json.dumps({_SCHEMA: tables.SCHEMA})
    for run in history.runs():
        yield json.dumps({_KIND: _RUN, "of": asdict(run)})
    for path in history.paths():
        yield json.dumps({_KIND: _PATH, "of": asdict(path)})
    for trial in history.trials():
        yield json.dumps({_KIND: _TRIAL, "of": asdict(trial)})


def import_lines(history: History, path: Path) -> int:
    """Add the records of a file that `export_lines` has made; returns how many trials were new.

    Raises HistoryError, which names file and line, for what is no record, and OSError. A last line
    without an end was being written when its writer died, and is left out.
    """
    with path.open(encoding="utf-8", errors="replace", newline="\n") as file:
        runs: list[ScanRun] = []
        paths: list[PathFiles] = []
        trials = _trials(_records(path, file), runs, paths)
        # runs and paths stand before the first trial
        first = next(trials, None)
        rest = () if first is None else chain((first,), trials)
        return history.take(runs, paths, rest)


def _trials(
    records: Iterable[Record], runs: list[ScanRun], paths: list[PathFiles]
) -> Iterator[TrialRecord]:
    """The trials; what else there is goes to `runs` and `paths`."""
    for record in records:
        if isinstance(record, ScanRun):
            runs.append(record)
        elif isinstance(record, PathFiles):
            paths.append(record)
        else:
            yield record


def _records(path: Path, lines: Iterable[str]) -> Iterator[Record]:
    for number, line in enumerate(lines, 1):
        if not line.endswith("\n"):
            return
        try:
            found = json.loads(line)
            if number == 1:
                _check_schema(found)
            else:
                yield _record(found)
        except (ValueError, KeyError, TypeError) as error:
            # the text of a KeyError is the key alone
            what = f"{error} is missing" if isinstance(error, KeyError) else error
            raise HistoryError(f"{path}:{number}: no record of a history: {what}") from error


def _check_schema(found: Any) -> None:
    if found[_SCHEMA] > tables.SCHEMA:
        raise ValueError(f"schema {found[_SCHEMA]}, and this version reads up to {tables.SCHEMA}")


def _record(found: Any) -> Record:
    kind = found[_KIND]
    if kind == _RUN:
        return tables.run_of(_known(found["of"], ScanRun))
    if kind == _PATH:
        return tables.path_of(_known(found["of"], PathFiles))
    if kind == _TRIAL:
        return tables.trial_of(_known(found["of"], TrialRecord))
    raise ValueError(f"kind must be {_RUN}, {_PATH} or {_TRIAL} (got {kind!r})")


def _known(row: dict[str, Any], kind: type[Record]) -> dict[str, Any]:
    """Raises ValueError for a field that does not exist."""
    extra = row.keys() - {field.name for field in fields(kind)}
    if extra:
        raise ValueError(f"there is no field {', '.join(sorted(extra))}")
    return row
