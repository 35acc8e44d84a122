"""What goes into a planted process and what comes out of it, as JSON. Pure; imports no torch.

A sighting is written, one per line, as soon as it is made, and each judge is announced before it
runs: if the process dies, earlier sightings are not lost and it is known which judge was running.
"""

from __future__ import annotations

import importlib.util
import json
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from loragate.faults.model import Part, Sighting
from loragate.faults.planting import PACKAGE
from loragate.matrix.case import Case

# what a process begins with
IMPORT = "import"


class Suite(StrEnum):
    """What looks for the fault."""

    # the items of the gate that the fault names
    GATE = "gate"
    # tests in the usual style of serving engines; see baseline_suite/
    BASELINE = "baseline_suite"


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """`module`: the module that was edited, None for a control without an edit. `tests` and
    `launches`: ids and labels. `first_only`: end with the first case or test that fails."""

    module: str | None
    suite: Suite
    cases: tuple[Case, ...] = ()
    tests: tuple[str, ...] = ()
    launches: tuple[str, ...] = ()
    first_only: bool = False


@dataclass(frozen=True, slots=True)
class Begun:
    """A judge that started; fields as those of a sighting."""

    judge: str
    case: str = ""
    part: Part | None = None


@dataclass(frozen=True, slots=True)
class Transcript:
    """What a process wrote. `current`: the judge that started and did not report, as `begin` got
    it, or None. `finished`: whether the process ran to its end."""

    sightings: tuple[Sighting, ...]
    current: Begun | None
    finished: bool


_ORDER: TypeAdapter[Order] = TypeAdapter(Order)
_SIGHTING: TypeAdapter[Sighting] = TypeAdapter(Sighting)
_BEGUN: TypeAdapter[Begun] = TypeAdapter(Begun)


def check_planted(order_path: Path) -> None:
    """Assert that this process would import the copy of the package that lies beside its order."""
    spec = importlib.util.find_spec(PACKAGE)
    origin = Path(str(spec and spec.origin)).resolve()
    assert origin.is_relative_to(order_path.resolve().parent), f"the planted copy is not {origin}"


def write_order(order: Order, path: Path) -> None:
    path.write_bytes(_ORDER.dump_json(order))


def read_order(path: Path) -> Order:
    return _ORDER.validate_json(path.read_bytes())


class Recorder:
    """Writes a transcript, in the planted process and in those that it starts."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", encoding="utf-8")

    def begin(self, begun: Begun) -> None:
        self._write({"begin": _BEGUN.dump_python(begun, mode="json")})

    def record(self, sighting: Sighting) -> None:
        self._write({"sighting": _SIGHTING.dump_python(sighting, mode="json")})

    def finish(self) -> None:
        self._write({"finished": True})

    def _write(self, line: dict[str, Any]) -> None:
        print(json.dumps(line), file=self._file, flush=True)


def read_transcript(path: Path) -> Transcript:
    sightings: list[Sighting] = []
    current: Begun | None = None
    finished = False
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    for line in text.splitlines(keepends=True):
        if not line.endswith("\n"):
            # the process died while it wrote this line
            break
        entry = json.loads(line)
        if "begin" in entry:
            current = _BEGUN.validate_python(entry["begin"])
        elif "sighting" in entry:
            sightings.append(_SIGHTING.validate_python(entry["sighting"]))
            current = None
        finished = finished or "finished" in entry
    return Transcript(tuple(sightings), current, finished)
