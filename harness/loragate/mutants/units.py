"""What a planted process is told to run and what it writes of it, as JSON. Imports no torch.

A unit is a case or a host test. Each is announced before it runs, so that it is known which one
was running when a process dies.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from loragate.core.verdict import Verdict

IMPORT = "import"
# no unit counts as hanging earlier
LEAST_DEADLINE_S = 60.0


class Kind(StrEnum):
    CASE = "case"
    TEST = "test"


@dataclass(frozen=True, slots=True)
class Unit:
    """A case by its run id, or a host test by pytest's id. `seconds`: what it takes on sound
    code."""

    kind: Kind
    name: str
    seconds: float = 0.0

    def deadline_s(self, least: float) -> float:
        """After this time the unit counts as hanging."""
        return least + 10.0 * self.seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """`root`: the planted checkout. `units` run in this order until one fails. `known`: a file with
    the names of all host tests of sound code; a test of another name is new, and runs as well.
    `cache`: the folder of compiled kernels.
    `traces`: a folder for the lines that each unit reaches; all units then run, each in a process
    of its own, and without `units` all host tests below `tests` run."""

    root: str
    transcript: str
    log: str
    units: tuple[Unit, ...] = ()
    known: str = ""
    cache: str = ""
    least_deadline_s: float = LEAST_DEADLINE_S
    traces: str = ""
    tests: tuple[str, ...] = ()


_ORDER: TypeAdapter[Order] = TypeAdapter(Order)


def to_json(order: Order) -> bytes:
    return _ORDER.dump_json(order)


def from_json(text: bytes) -> Order:
    return _ORDER.validate_json(text)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How a unit ended: `judge` is the oracle that did not pass, `place` numbers its trace."""

    unit: str
    verdict: Verdict
    judge: str = ""
    kind: str = ""
    message: str = ""
    seconds: float = 0.0
    trace: str = ""

    @property
    def fails_gate(self) -> bool:
        """Whether a gate in which the unit ends like this does not end with exit code 0."""
        return self.verdict in (Verdict.FAIL, Verdict.INFRA, Verdict.INCONCLUSIVE)


_ENDED: TypeAdapter[Ended] = TypeAdapter(Ended)


class Transcript:
    """Appends to a file, which several processes may do, one after the other."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", encoding="utf-8")

    def begin(self, unit: str) -> None:
        self._write({"begin": unit})

    def end(self, ended: Ended) -> None:
        self._write({"end": _ENDED.dump_python(ended, mode="json")})

    def finish(self) -> None:
        self._write({"finished": True})

    def _write(self, line: Mapping[str, Any]) -> None:
        print(json.dumps(line), file=self._file, flush=True)


@dataclass(frozen=True, slots=True)
class Story:
    """What a transcript says. `current`: the unit that began and did not end, or ""."""

    ended: tuple[Ended, ...]
    current: str
    finished: bool


def read_transcript(path: Path) -> Story:
    ended: list[Ended] = []
    current, finished = "", False
    for line in _whole_lines(path):
        entry = json.loads(line)
        if "begin" in entry:
            current = entry["begin"]
        elif "end" in entry:
            ended.append(_ENDED.validate_python(entry["end"]))
            current = ""
        finished = finished or "finished" in entry
    return Story(tuple(ended), current, finished)


def _whole_lines(path: Path) -> Iterator[str]:
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    # a process that dies leaves half a line
    return (line for line in text.splitlines(keepends=True) if line.endswith("\n"))
