"""The tables of a history and the version of their layout."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import fields
from types import MappingProxyType
from typing import Any

from sqlalchemy import (
    Boolean,
    Column,
    Float,
    ForeignKey,
    Integer,
    MetaData,
    String,
    Table,
    Text,
)

from loragate.history.model import (
    Glance,
    Outcome,
    PathFiles,
    Purpose,
    ScanRun,
    TrialRecord,
)

SCHEMA = 1
# version -> the statements that make a history of that version one of the next
UPGRADES: Mapping[int, Sequence[str]] = MappingProxyType({})

METADATA = MetaData()

SCHEMA_TABLE = Table("history_schema", METADATA, Column("version", Integer, primary_key=True))

RUNS = Table(
    "scan_runs",
    METADATA,
    Column("uid", String(64), primary_key=True),
    Column("machine", Text, nullable=False),
    Column("started_at", Float, nullable=False),
    Column("commit", Text, nullable=False),
    Column("tree", Text, nullable=False),
    Column("budget_s", Float, nullable=False),
    Column("environment", Text, nullable=False),
    Column("finished_at", Float),
)

TRIALS = Table(
    "trials",
    METADATA,
    Column("run", String(64), ForeignKey("scan_runs.uid"), primary_key=True),
    Column("number", Integer, primary_key=True, autoincrement=False),
    Column("at", Float, nullable=False),
    Column("case", Text, nullable=False),
    Column("subject", Text, nullable=False),
    Column("site", Text, nullable=False),
    Column("path", Text, nullable=False),
    Column("path_key", Text, nullable=False),
    Column("grouped", Text, nullable=False),
    Column("device", Text, nullable=False),
    Column("draw", Integer, nullable=False),
    Column("measure", Text, nullable=False),
    Column("purpose", Text, nullable=False),
    Column("outcome", Text, nullable=False),
    Column("promised", Boolean, nullable=False),
    Column("failure", Text, nullable=False),
    Column("message", Text, nullable=False),
    Column("digest", Text, nullable=False),
    Column("process", Integer, nullable=False),
    Column("place", Integer, nullable=False),
    Column("duration_s", Float, nullable=False),
    Column("replay", Text, nullable=False),
    Column("cause", Text, nullable=False),
    Column("conditions", Text, nullable=False),
    Column("health", Text, nullable=False),
)

PATHS = Table(
    "path_files",
    METADATA,
    Column("path_key", String(64), primary_key=True),
    Column("files", Text, nullable=False),
)

_PURPOSE, _OUTCOME = map(Glance._fields.index, ("purpose", "outcome"))
_MAPPINGS = ("environment", "conditions", "health")


def row_of(record: ScanRun | TrialRecord) -> dict[str, Any]:
    """The row of a record; what is no number and no text becomes JSON. The message of a subject may
    hold anything: what a database refuses is written out."""
    row: dict[str, Any] = {
        field.name: _written(value) if isinstance(value, str) else value
        for field in fields(record)
        for value in (getattr(record, field.name),)
    }
    for name in _MAPPINGS:
        if name in row:
            # most trials have plain conditions
            row[name] = _json_of(row[name]) if row[name] else "{}"
    return row


def _json_of(mapping: Mapping[str, Any]) -> str:
    written = {
        _written(name): _written(value) if isinstance(value, str) else value
        for name, value in mapping.items()
    }
    return json.dumps(written, sort_keys=True)


def _written(text: str) -> str:
    """A text that UTF-8 can encode, without the zero that PostgreSQL refuses."""
    return text.encode(errors="backslashreplace").decode().replace("\0", "\\0")


def path_row_of(path: PathFiles) -> dict[str, Any]:
    files = [_written(file) for file in path.files]
    return {"path_key": path.path_key, "files": json.dumps(files)}


def path_of(row: Mapping[str, Any]) -> PathFiles:
    files = row["files"]
    found = json.loads(files) if isinstance(files, str) else files
    return PathFiles(path_key=row["path_key"], files=tuple(found))


def run_of(row: Mapping[str, Any]) -> ScanRun:
    return ScanRun(**_filled(row, "started_at"))


def trial_of(row: Mapping[str, Any]) -> TrialRecord:
    filled = _filled(row, "at")
    filled["purpose"] = Purpose(filled["purpose"])
    filled["outcome"] = Outcome(filled["outcome"])
    filled["promised"] = bool(filled["promised"])
    return TrialRecord(**filled)


def glance_of(row: Sequence[Any]) -> Glance:
    """Of a row with the fields of a Glance. Raises ValueError."""
    values = list(row)
    values[_PURPOSE] = Purpose(values[_PURPOSE])
    values[_OUTCOME] = Outcome(values[_OUTCOME])
    return Glance._make(values)


def _filled(row: Mapping[str, Any], time: str) -> dict[str, Any]:
    """`time`: the field by which records are ordered. Raises ValueError."""
    filled = dict(row)
    # SQLite keeps a text in a column of numbers
    filled[time] = float(filled[time])
    for name in _MAPPINGS:
        if isinstance(filled.get(name), str):
            filled[name] = {} if filled[name] == "{}" else json.loads(filled[name])
            if not isinstance(filled[name], dict):
                raise ValueError(f"{name} must be an object")
    return filled
