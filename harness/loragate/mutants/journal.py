"""The results of a run, one line each, so that an interrupted run goes on where it was."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from loragate.core.files import lock_of
from loragate.core.json_text import parse_json
from loragate.mutants.model import Fate, Mutant, Result
from loragate.mutants.ordering import Kill

_RESULT: TypeAdapter[Result] = TypeAdapter(Result)
_WHAT_TO_DO = "remove it, or choose another --folder"


class JournalError(ValueError):
    """The results cannot be used; the message names the file."""


class OtherState(JournalError):
    """Results of other code, or of another sample, which must not be mixed."""


@dataclass(frozen=True, slots=True)
class Journal:
    """`state` is the digest of the code that the results are of."""

    path: Path
    state: str

    def open(self, mutants: Iterable[Mutant]) -> dict[str, Result]:
        """The results of `mutants` so far, by id. Raises JournalError.

        Whoever writes an edit names it: a result of another edit of that name is none of it."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # several processes may begin the same file, and only one of them writes the first line
        with lock_of(self.path):
            lines = list(_lines(self.path))
            if not lines:
                self._append({"state": self.state})
                return {}
        if lines[0][1].get("state") != self.state:
            raise OtherState(
                f"{self.path}: was written for another state of the code; {_WHAT_TO_DO}"
            )
        changes = {mutant.id: _change(mutant) for mutant in mutants}
        read = [(self._result(number, entry), entry.get("change")) for number, entry in lines[1:]]
        found = [result for result, change in read if changes.get(result.id) == change]
        # what broke for reasons outside of the mutant runs again
        return {result.id: result for result in found if result.fate is not Fate.BROKEN}

    def _result(self, number: int, entry: dict[str, Any]) -> Result:
        try:
            return _RESULT.validate_python(entry.get("result"))
        except ValidationError as error:
            what = error.errors()[0]
            field = ".".join(["result", *map(str, what["loc"])])
            raise JournalError(
                f"{self.path}:{number}: {field}: {what['msg']}; {_WHAT_TO_DO}"
            ) from error

    def add(self, mutant: Mutant, result: Result) -> None:
        entry = {
            "module": mutant.module,
            "function": mutant.function,
            "change": _change(mutant),
            "result": _RESULT.dump_python(result, mode="json"),
        }
        with lock_of(self.path):
            self._append(entry)

    def _append(self, entry: dict[str, Any]) -> None:
        """With the lock."""
        with self.path.open("a+b") as file:
            file.seek(0, 2)
            if file.tell():
                file.seek(-1, 2)
                # a process that was killed may have left half a line
                if file.read(1) != b"\n":
                    file.write(b"\n")
            file.write(json.dumps(entry).encode() + b"\n")


def _change(mutant: Mutant) -> str:
    """A digest of what the mutant changes in code of one state."""
    text = "\0".join([mutant.module, str(mutant.start), str(mutant.end), mutant.new])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def kills_in(folder: Path) -> Iterator[Kill]:
    """What killed mutants in all runs of a folder."""
    for path in sorted(folder.glob("*.jsonl")):
        for _, entry in _lines(path):
            result = entry.get("result")
            if not isinstance(result, dict) or result.get("fate") != Fate.KILLED:
                continue
            kill = [entry.get("module"), entry.get("function"), result.get("killer")]
            texts = [part for part in kill if isinstance(part, str)]
            # a damaged line only makes the order of units worse
            if len(texts) == len(kill):
                yield Kill(*texts)


def _lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """The entries with the numbers of their lines."""
    data = path.read_bytes() if path.exists() else b""
    for number, line in enumerate(data.split(b"\n"), 1):
        try:
            entry = parse_json(line)
        except ValueError:
            # half a line of a process that was killed
            continue
        if isinstance(entry, dict):
            yield number, entry
