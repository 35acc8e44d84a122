"""Append events to a JSONL file and read them back. Imports no torch.

Invariant: a line that is duplicated, torn or left behind by another run never improves a verdict;
a reader counts what it leaves out.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any

from pydantic import TypeAdapter, ValidationError
from pydantic_core import PydanticSerializationError, to_json, to_jsonable_python

from loragate.core.json_text import parse_json
from loragate.core.plural import counted
from loragate.events.model import (
    SCHEMA,
    CaseFinished,
    CaseStarted,
    CompileResult,
    Event,
    HostTestFinished,
    HostTestsCollected,
    KnownFinding,
    LegFinished,
    LegStarted,
    Note,
    RunFinished,
    RunStarted,
)
from loragate.events.upgrade import upgrade


class EventsError(ValueError):
    """A file of events that this version cannot judge; the message names file and line."""


class Durability(StrEnum):
    # survives the death of the process
    FLUSHED = "flushed"
    # survives the death of the machine
    SYNCED = "synced"


_KINDS: Mapping[str, type[Event]] = {
    "run_started": RunStarted,
    "leg_started": LegStarted,
    "leg_finished": LegFinished,
    "case_started": CaseStarted,
    "case_finished": CaseFinished,
    "compile_result": CompileResult,
    "host_tests_collected": HostTestsCollected,
    "host_test_finished": HostTestFinished,
    "note": Note,
    "known_finding": KnownFinding,
    "run_finished": RunFinished,
}
_KIND_OF = {event_type: kind for kind, event_type in _KINDS.items()}


@dataclass(frozen=True, slots=True)
class EventLog:
    """`events` of one run in file order, and how many lines were left out: of `unknown` kinds,
    `damaged` (torn by a kill, or without the fields of their kind), and of a `foreign` run."""

    events: tuple[Event, ...]
    unknown: int = 0
    damaged: int = 0
    foreign: int = 0

    @property
    def left_out(self) -> tuple[str, ...]:
        """What a reader should know of the records that are not among the events."""
        kinds = (
            (self.unknown, "of a kind that this version does not know"),
            (self.damaged, "torn or damaged"),
            (self.foreign, "of another run"),
        )
        return tuple(
            f"{counted(number, f'record {what} was', f'records {what} were')} left out"
            for number, what in kinds
            if number
        )

    def with_events(self, events: Iterable[Event]) -> EventLog:
        """The same log with more events at its end."""
        return replace(self, events=(*self.events, *events))


class EventWriter:
    """Appends records of one run; several processes may append to one file.

    Every record is one write to a file opened for appending, so that lines never interleave.
    """

    def __init__(
        self, path: Path, *, run: str, durability: Durability = Durability.FLUSHED
    ) -> None:
        self._run = run
        self._durability = durability
        path.parent.mkdir(parents=True, exist_ok=True)
        self._fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        self._end_torn_line()

    def write(self, event: Event) -> None:
        self._append(f"{encode(event, run=self._run)}\n".encode())

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> EventWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _end_torn_line(self) -> None:
        # a killed writer may have left half a record, which would swallow our first one
        size = os.fstat(self._fd).st_size
        if size and os.pread(self._fd, 1, size - 1) != b"\n":
            self._append(b"\n")

    def _append(self, data: bytes) -> None:
        written = os.write(self._fd, data)
        while written < len(data):
            written += os.write(self._fd, data[written:])
        if self._durability is Durability.SYNCED:
            os.fsync(self._fd)


def encode(event: Event, *, run: str) -> str:
    """One record as one line of strict JSON; floats that are not finite become text."""
    record = {"schema": SCHEMA, "kind": _KIND_OF[type(event)], "run": run, "event": event}
    try:
        line = to_json(record, inf_nan_mode="strings", fallback=_scalar)
    except PydanticSerializationError:
        # bytes of a log that were not text are surrogates by now; they must not cost the record
        plain = json.dumps(to_jsonable_python(record, fallback=_scalar), ensure_ascii=False)
        line = to_json(json.loads(plain.encode(errors="replace")), inf_nan_mode="strings")
    return line.decode()


def read_events(path: Path, *, run: str | None = None) -> EventLog:
    """Events of `run`; without it, of the run of the file's first RunStarted, or of its first
    record if there is none.

    Raises EventsError if there is no such file or a record was written by a newer version.
    """
    read: list[tuple[str, Event]] = []
    unknown = damaged = 0
    for number, line in enumerate(_lines(path), start=1):
        record = _record(line)
        if record is None:
            damaged += 1
            continue
        _refuse_newer(record, path, number)
        if record["kind"] not in _KINDS:
            unknown += 1
            continue
        event = _decode(record)
        if event is None:
            damaged += 1
            continue
        read.append((record["run"], event))
        if run is None and isinstance(event, RunStarted):
            run = record["run"]
    run = run if run is not None or not read else read[0][0]
    events = tuple(event for owner, event in read if owner == run)
    return EventLog(events, unknown=unknown, damaged=damaged, foreign=len(read) - len(events))


class EventTail:
    """Follows a file that others append to; every event is returned once.

    The file need not exist yet. Lines that cannot be read are ignored: `read_events` counts them.
    """

    def __init__(self, path: Path, *, run: str) -> None:
        self._path = path
        self._run = run
        self._offset = 0

    def poll(self) -> tuple[Event, ...]:
        """Events of the run whose lines were completed since the last call."""
        if not self._path.exists():
            return ()
        with self._path.open("rb") as file:
            file.seek(self._offset)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        records = (_record(line) for line in whole.decode("utf-8", errors="replace").split("\n"))
        ours = (r for r in records if r is not None and r["run"] == self._run)
        events = (_decode(record) for record in ours if record["kind"] in _KINDS)
        return tuple(event for event in events if event is not None)


def _lines(path: Path) -> Iterator[str]:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise EventsError(f"{path}: cannot read events: {error.strerror}") from error
    # a kill may cut a character in two, and only "\n" ends a record
    for line in data.decode("utf-8", errors="replace").split("\n"):
        if line.strip():
            yield line


def _record(line: str) -> dict[str, Any] | None:
    # json instead of pydantic: records of schema 1 may hold surrogates, which pydantic refuses
    try:
        record = parse_json(line)
    except ValueError:
        return None
    if not isinstance(record, dict):
        return None
    types = {"schema": int, "kind": str, "run": str, "event": dict}
    whole = all(isinstance(record.get(key), wanted) for key, wanted in types.items())
    return record if whole else None


def _refuse_newer(record: Mapping[str, Any], path: Path, number: int) -> None:
    if record["schema"] > SCHEMA:
        raise EventsError(
            f"{path}:{number}: schema {record['schema']} is newer than {SCHEMA}, "
            "the newest that this version of loragate can read"
        )


@cache
def _adapter(kind: str) -> TypeAdapter[Event]:
    return TypeAdapter(_KINDS[kind])


def _decode(record: Mapping[str, Any]) -> Event | None:
    event = upgrade(record["schema"], record["kind"], record["event"])
    try:
        return _adapter(record["kind"]).validate_python(event)
    except ValidationError:
        return None


def _scalar(value: object) -> object:
    """A scalar of numpy or torch as a number of Python; both have `item`."""
    item = getattr(value, "item", None)
    assert item is not None, f"{type(value).__name__} cannot be recorded"
    return item()
