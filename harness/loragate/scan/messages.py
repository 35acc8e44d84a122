"""What a scan and the processes of its trials say to each other. Pickled; imports no torch."""

from __future__ import annotations

import pickle
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from loragate.core.gpus import GpuShare
from loragate.history.model import Outcome
from loragate.matrix.case_run import CaseRun
from loragate.nightly.conditions import Conditions
from loragate.nightly.wave import Measure

_LENGTH = struct.Struct("!I")


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One trial. traced: whether to find out which source it runs."""

    run: CaseRun
    measure: Measure
    traced: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """The trials of one process, in `folder`; it runs them again until `peers` processes of the
    same wave, of which it is number `number`, are through as well. share: its memory of a GPU that
    the workers of the scan `run` share."""

    steps: tuple[Step, ...]
    conditions: Conditions
    folder: Path
    wave: Path
    number: int
    peers: int
    run: str = ""
    share: GpuShare | None = None

    @property
    def answers(self) -> Path:
        """A pipe, which ends with the process."""
        return self.folder / "answers"

    @property
    def stacks(self) -> Path:
        return self.folder / "stacks"

    @property
    def stop(self) -> Path:
        """A file: while it is there, no trial begins."""
        return self.folder / "stop"

    def ready(self, number: int) -> Path:
        return self.wave / f"ready-{number}"

    def through(self, number: int) -> Path:
        return self.wave / f"through-{number}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Began:
    """Step `index` begins: what is heard next is its end, or it has ended the process.

    device: what the process runs on, also for a step that ends it; "" where CUDA does not start.
    """

    index: int
    device: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """digests: of equal inputs, one after the other. path: "" where the step was not traced."""

    index: int
    outcome: Outcome
    failure: str
    message: str
    digests: tuple[str, ...]
    duration_s: float
    promised: bool
    path: str = ""
    path_key: str = ""
    files: tuple[str, ...] = ()


Message: TypeAlias = Began | Measured


def packed(message: Message) -> bytes:
    data = pickle.dumps(message)
    return _LENGTH.pack(len(data)) + data


class Unpacker:
    """Messages out of the bytes of a pipe, as they arrive; one that is torn is never given."""

    def __init__(self) -> None:
        self._bytes = b""

    def feed(self, data: bytes) -> Iterator[Message]:
        self._bytes += data
        while len(self._bytes) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._bytes)
            end = _LENGTH.size + length
            if len(self._bytes) < end:
                return
            message: Message = pickle.loads(self._bytes[_LENGTH.size : end])
            self._bytes = self._bytes[end:]
            yield message
