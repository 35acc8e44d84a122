"""The results of a run, one line each, so that an interrupted run goes on where it was."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from loragate.core.files import lock_of
from loragate.mutants.model import Fate, Mutant, Result
from loragate.mutants.ordering import Kill

_RESULT: TypeAdapter[Result] = TypeAdapter(Result)


class OtherState(ValueError):
    """Results of other code, or of another sample, which must not be mixed."""


@dataclass(frozen=True, slots=True)
class Journal:
    """`state` is the digest of the code that the results are of."""

    path: Path
    state: str

    def open(self) -> dict[str, Result]:
        """The results so far, by id. Raises OtherState."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        lines = list(_lines(self.path))
        if not lines:
            self._append({"state": self.state})
            return {}
        if lines[0].get("state") != self.state:
            raise OtherState(
                f"{self.path}: was written for another state of the code; remove it, or choose "
                "another --folder"
            )
        found = [_RESULT.validate_python(line["result"]) for line in lines[1:]]
        # what broke for reasons outside of the mutant runs again
        return {result.id: result for result in found if result.fate is not Fate.BROKEN}

    def add(self, mutant: Mutant, result: Result) -> None:
        self._append(
            {
                "module": mutant.module,
                "function": mutant.function,
                "result": _RESULT.dump_python(result, mode="json"),
            }
        )

    def _append(self, line: dict[str, Any]) -> None:
        with lock_of(self.path), self.path.open("a+b") as file:
            file.seek(0, 2)
            if file.tell():
                file.seek(-1, 2)
                # a process that was killed may have left half a line
                if file.read(1) != b"\n":
                    file.write(b"\n")
            file.write(json.dumps(line).encode() + b"\n")


def kills_in(folder: Path) -> Iterator[Kill]:
    """What killed mutants in all runs of a folder."""
    for path in sorted(folder.glob("*.jsonl")):
        for line in _lines(path):
            result = line.get("result", {})
            if result.get("fate") == Fate.KILLED:
                yield Kill(line["module"], line["function"], result["killer"])


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    for line in text.splitlines():
        try:
            entry = json.loads(line)
        except json.JSONDecodeError:
            # half a line of a process that was killed
            continue
        yield entry
