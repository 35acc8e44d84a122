"""The recorded resources, one line per kernel so that a change is easy to review.

Register allocation may change from release to release, so each minor release of Triton has its
own record. Patch releases share one. The content next to the resources says what was compiled: a
kernel that still has it need not be compiled again (content.py).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TypeAlias

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass as checked

from loragate.core.files import read_regular, write_atomically
from loragate.core.resources import Resources

SCHEMA = 2

# arch, kernel, specialisation
Key: TypeAlias = tuple[str, str, str]


class BaselineError(ValueError):
    """A baseline that cannot be read; the message names the file."""


@dataclass(frozen=True, slots=True)
class Record:
    """Resources under one minor release; `triton` is the exact version that was measured, and
    `contents` says what was compiled with it."""

    triton: str
    entries: Mapping[Key, Resources]
    contents: Mapping[Key, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Baseline:
    records: Mapping[str, Record] = field(default_factory=dict)

    def find(self, triton: str) -> Record | None:
        return self.records.get(minor_release(triton))

    def with_record(self, record: Record) -> Baseline:
        """This baseline with `record` in place of what its minor release had."""
        return replace(self, records={**self.records, minor_release(record.triton): record})

    @property
    def keys(self) -> frozenset[Key]:
        """Every specialisation that is on record for any release."""
        return frozenset(key for record in self.records.values() for key in record.entries)


def minor_release(version: str) -> str:
    """3.7 of 3.7.1."""
    return ".".join(version.split(".")[:2])


@checked(frozen=True, config=ConfigDict(extra="forbid"))
class _Entry:
    registers: int
    spills: int
    shared_bytes: int
    content: str


@checked(frozen=True, config=ConfigDict(extra="forbid"))
class _Record:
    triton: str
    entries: dict[str, _Entry]


@checked(frozen=True, config=ConfigDict(extra="forbid"))
class _File:
    schema: int
    records: dict[str, _Record]


_FILE = TypeAdapter(_File)
_SEPARATOR = " "


def load_baseline(path: Path) -> Baseline:
    """Raises BaselineError if the file is missing or not in the format of this version."""
    try:
        file = _FILE.validate_json(read_regular(path))
    except OSError as error:
        raise BaselineError(f"{path}: cannot be read: {error.strerror}") from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise BaselineError(f"{path}: {where}: {first['msg']}") from error
    if file.schema != SCHEMA:
        raise BaselineError(f"{path}: schema must be {SCHEMA} (got {file.schema})")
    return Baseline({name: _record(path, record) for name, record in file.records.items()})


def save_baseline(baseline: Baseline, path: Path) -> None:
    write_atomically(path, _text(baseline))


def _record(path: Path, record: _Record) -> Record:
    entries: dict[Key, Resources] = {}
    contents: dict[Key, str] = {}
    for name, entry in record.entries.items():
        parts = name.split(_SEPARATOR)
        if len(parts) != 3:
            raise BaselineError(f"{path}: {name!r} must be arch, kernel and specialisation")
        key = (parts[0], parts[1], parts[2])
        entries[key] = Resources(entry.registers, entry.spills, entry.shared_bytes)
        contents[key] = entry.content
    return Record(record.triton, entries, contents)


def _text(baseline: Baseline) -> str:
    records = [_record_text(name, baseline.records[name]) for name in sorted(baseline.records)]
    body = ",\n".join(records)
    return f'{{\n"records": {{\n{body}\n}},\n"schema": {SCHEMA}\n}}\n'


def _record_text(name: str, record: Record) -> str:
    lines = ",\n".join(
        f"{json.dumps(_SEPARATOR.join(key))}: {json.dumps(_fields(record, key))}"
        for key in sorted(record.entries)
    )
    return (
        f'{json.dumps(name)}: {{"entries": {{\n{lines}\n}}, "triton": {json.dumps(record.triton)}}}'
    )


def _fields(record: Record, key: Key) -> dict[str, object]:
    return {**asdict(record.entries[key]), "content": record.contents.get(key, "")}
