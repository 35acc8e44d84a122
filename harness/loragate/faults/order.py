"""What goes into a planted process and what comes out of it, as JSON. Pure; imports no torch.

A sighting is written, one per line, as soon as it is made, and each judge is announced before it
runs: if the process dies, earlier sightings are not lost and it is known which judge was running.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from loragate.faults.model import Check, Sighting
from loragate.matrix.case import Case


class Suite(StrEnum):
    """What looks for the fault."""

    # the oracles and checks that the fault names
    ORACLES = "oracles"
    # tests in the usual style of serving engines; see baseline_suite/
    BASELINE = "baseline_suite"


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """`planted`: the folder that the package must be imported from. `module`: the module that was
    edited, None for a control without an edit."""

    planted: str
    module: str | None
    suite: Suite
    cases: tuple[Case, ...]
    checks: tuple[Check, ...]


@dataclass(frozen=True, slots=True)
class Transcript:
    """What a process wrote. `current`: the judge that started and did not report, or "".
    `finished`: whether the process ran to its end."""

    sightings: tuple[Sighting, ...]
    current: str
    finished: bool


_ORDER: TypeAdapter[Order] = TypeAdapter(Order)
_SIGHTING: TypeAdapter[Sighting] = TypeAdapter(Sighting)


def write_order(order: Order, path: Path) -> None:
    path.write_bytes(_ORDER.dump_json(order))


def read_order(path: Path) -> Order:
    return _ORDER.validate_json(path.read_bytes())


class Recorder:
    """Writes a transcript, in the planted process."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", encoding="utf-8")

    def begin(self, what: str) -> None:
        self._write({"begin": what})

    def record(self, sighting: Sighting) -> None:
        self._write({"sighting": _SIGHTING.dump_python(sighting, mode="json")})

    def finish(self) -> None:
        self._write({"finished": True})

    def _write(self, line: dict[str, Any]) -> None:
        print(json.dumps(line), file=self._file, flush=True)


def read_transcript(path: Path) -> Transcript:
    sightings: list[Sighting] = []
    current, finished = "", False
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    for line in text.splitlines(keepends=True):
        if not line.endswith("\n"):
            # the process died while it wrote this line
            break
        entry = json.loads(line)
        if "begin" in entry:
            current = entry["begin"]
        elif "sighting" in entry:
            sightings.append(_SIGHTING.validate_python(entry["sighting"]))
            current = ""
        finished = finished or "finished" in entry
    return Transcript(tuple(sightings), current, finished)
