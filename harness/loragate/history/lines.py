"""A history as lines of JSON, for machines that share no database."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import Any

from loragate.core.json_text import parse_json
from loragate.history import tables
from loragate.history.fields import Record, checked
from loragate.history.model import HistoryError, PathFiles, ScanRun, TrialRecord
from loragate.history.store import History

_SCHEMA, _COUNT = "schema", "records"
_KIND, _OF = "kind", "of"
_RUN, _PATH, _TRIAL = "run", "path", "trial"


def export_lines(history: History) -> Iterator[str]:
    """The schema and how many records follow, then these: all runs, paths and trials, the oldest
    first; one JSON object a line."""
    kinds = ((_RUN, history.runs()), (_PATH, history.paths()), (_TRIAL, history.trials()))
    records = [
        json.dumps({_KIND: kind, _OF: asdict(record)}) for kind, found in kinds for record in found
    ]
    return chain([json.dumps({_SCHEMA: tables.SCHEMA, _COUNT: len(records)})], records)


def import_lines(history: History, path: Path) -> int:
    """Add the records of a file that `export_lines` has made; returns how many trials were new.

    Raises HistoryError, which names file and line, for what is no record and for a file that is
    cut, of which nothing is added, and OSError.
    """
    with path.open(encoding="utf-8", errors="replace", newline="\n") as file:
        runs: list[ScanRun] = []
        paths: list[PathFiles] = []
        known = {run.uid for run in history.runs()}
        trials = _trials(_records(path, file, known), runs, paths)
        # runs and paths stand before the first trial
        first = next(trials, None)
        rest = () if first is None else chain((first,), trials)
        return history.take(runs, paths, rest)


def check_lines(path: Path, known: set[str]) -> None:
    """Raises for what `import_lines` refuses. known: the runs that trials may belong to; those of
    the file are added."""
    with path.open(encoding="utf-8", errors="replace", newline="\n") as file:
        for _ in _records(path, file, known):
            pass


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


def _records(path: Path, lines: Iterable[str], known: set[str]) -> Iterator[Record]:
    """known: the runs that trials may belong to; those of the file are added."""
    number, promised = 0, None
    for number, line in enumerate(lines, 1):
        try:
            if not line.endswith("\n"):
                raise ValueError("the line has no end: the file is cut, copy it again")
            found = _parsed(line)
            if number == 1:
                promised = _promised_records(found)
            else:
                yield _record(found, known)
        except ValueError as error:
            raise HistoryError(f"{path}:{number}: no record of a history: {error}") from error
    if not number:
        raise HistoryError(f"{path}: no history: the file is empty")
    if promised not in (None, number - 1):
        raise HistoryError(
            f"{path}: {number - 1} records follow the first line, which says {promised}: the file "
            "is cut or was changed, copy it again"
        )


def _parsed(line: str) -> Any:
    try:
        return parse_json(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"is not JSON: {error.msg} in column {error.colno}") from error


def _promised_records(found: Any) -> int | None:
    """How many records follow; None of an export that does not say. Raises ValueError."""
    given = found.get(_SCHEMA) if isinstance(found, dict) else None
    if type(given) is not int or given < 1:
        raise ValueError(f'the first line must be as {{"{_SCHEMA}": {tables.SCHEMA}}}')
    if given > tables.SCHEMA:
        raise ValueError(
            f"has schema {given}; this version of loragate reads up to {tables.SCHEMA}: "
            "update loragate"
        )
    count = found.get(_COUNT)
    if count is not None and (type(count) is not int or count < 0):
        raise ValueError(f"{_COUNT} must be an integer >= 0 (got {count!r})")
    return count


def _record(found: Any, known: set[str]) -> Record:
    kind = found.get(_KIND) if isinstance(found, dict) else None
    if kind == _RUN:
        run = tables.run_of(checked(ScanRun, found.get(_OF)))
        known.add(run.uid)
        return run
    if kind == _PATH:
        return tables.path_of(checked(PathFiles, found.get(_OF)))
    if kind != _TRIAL:
        raise ValueError(f"{_KIND} must be {_RUN}, {_PATH} or {_TRIAL} (got {kind!r})")
    trial = tables.trial_of(checked(TrialRecord, found.get(_OF)))
    if trial.run not in known:
        raise ValueError(f"there is no run {trial.run!r} above it, nor in the history")
    return trial
