"""Append events to a JSONL file and read them back. Pure; imports no torch.

Invariant: no line that can be read twice, torn or left behind by another run makes a result
better; a reader counts what it left out.
"""

from __future__ import annotations

import json
import math
import operator
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum, StrEnum
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any, SupportsFloat, SupportsIndex

from pydantic import TypeAdapter, ValidationError

from loragate.events.model import (
    SCHEMA,
    CaseFinished,
    CaseStarted,
    CompileResult,
    Event,
    KnownFinding,
    LegFinished,
    LegStarted,
    Note,
    RunFinished,
    RunStarted,
)


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
    "note": Note,
    "known_finding": KnownFinding,
    "run_finished": RunFinished,
}
_KIND_OF = {event_type: kind for kind, event_type in _KINDS.items()}


@dataclass(frozen=True, slots=True)
class EventLog:
    """`events` of one run in file order. Left out and counted: `unknown` kinds, `damaged` lines
    (torn by a kill, or not what their kind requires), lines of a `foreign` run."""

    events: tuple[Event, ...]
    unknown: int = 0
    damaged: int = 0
    foreign: int = 0


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
        self._append(encode(event, run=self._run).encode() + b"\n")

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
    """One record as one line of strict JSON with sorted keys; non-finite floats become text."""
    record = {"schema": SCHEMA, "kind": _KIND_OF[type(event)], "run": run, "event": _plain(event)}
    return json.dumps(record, sort_keys=True, separators=(",", ":"), allow_nan=False)


def read_events(path: Path) -> EventLog:
    """Events of the run that the file's first RunStarted (else its first record) belongs to.

    Raises EventsError if there is no such file or a record was written by a newer version.
    """
    run: str | None = None
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
    """Follows a file that others append to; every event is handed out once.

    The file need not exist yet. What cannot be read is left to `read_events` to count.
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


def merge_events(paths: Iterable[Path], into: Path) -> int:
    """Append the lines of `paths` that `into` does not have yet; returns how many.

    Idempotent. Damaged lines are copied too, once: the report counts them.
    """
    into.parent.mkdir(parents=True, exist_ok=True)
    known = set(_lines(into)) if into.exists() else set()
    fresh: list[str] = []
    for path in sorted(paths):
        for line in _lines(path):
            if line not in known:
                known.add(line)
                fresh.append(line)
    if fresh:
        torn = bool(into.exists() and into.stat().st_size and into.read_bytes()[-1:] != b"\n")
        with into.open("a", encoding="utf-8", newline="\n") as file:
            file.write("\n" * torn + "".join(f"{line}\n" for line in fresh))
    return len(fresh)


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
    try:
        record = json.loads(line)
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
    try:
        return _adapter(record["kind"]).validate_python(record["event"])
    except ValidationError:
        return None


def _plain(value: object) -> object:
    if is_dataclass(value) and not isinstance(value, type):
        return {item.name: _plain(getattr(value, item.name)) for item in fields(value)}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, (str, int)):
        return value
    # scalars of numpy and torch come as neither int nor float
    if isinstance(value, SupportsIndex):
        # a torch scalar of floats offers __index__ and refuses it
        with suppress(TypeError):
            return operator.index(value)
    assert isinstance(value, SupportsFloat), f"{type(value).__name__} cannot be recorded"
    number = float(value)
    # json has no word for the non-finite
    return number if math.isfinite(number) else str(number)
