"""What a scan plans: trials in waves, what is known of their cases, and where they run. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from loragate.nightly.conditions import Conditions

# a case that nobody has timed
UNTIMED_S = 1.0


class Measure(StrEnum):
    BITS = "bits"
    JUDGED = "judged"


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """A trial to be made: a case by its run id, and the draw of its data."""

    case: str
    draw: int
    measure: Measure

    @property
    def id(self) -> str:
        return f"{self.case}#{self.draw} ({self.measure})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Wave:
    """Processes; each has its conditions and its order of trials.

    is_alone: nothing else may run at that time. Otherwise each is for one worker, which begins when
    it is free.
    """

    processes: tuple[tuple[Conditions, tuple[Wanted, ...]], ...]
    is_alone: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """What is known of a case: trials of either measure since the last change of the source that it
    runs, how long each takes, and whether its path is still undecided. changed: since the revision
    that was asked for, or never seen. traced: it is known which source it runs. path: its path and
    group, "" without trials; alone: how many trials of all cases of that path ran with nothing
    beside them. has_bits: whether its result is a tensor whose bits can be compared; otherwise
    oracles judge it alone. is_large: it needs more device memory than a worker has, so that only
    one such trial runs at a time on each GPU."""

    bits: int = 0
    judged: int = 0
    bits_s: float = UNTIMED_S
    judged_s: float = UNTIMED_S
    changed: bool = True
    decided: bool = False
    traced: bool = True
    path: str = ""
    alone: int = 0
    has_bits: bool = True
    is_large: bool = False

    def seconds(self, measure: Measure) -> float:
        """What a trial takes."""
        return self.bits_s if measure is Measure.BITS else self.judged_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a scan runs. workers: processes at the same time on each GPU, or on the CPU."""

    gpus: tuple[str, ...] = ()
    workers: int = 1

    @property
    def neighbours(self) -> int:
        return self.workers - 1

    @property
    def slots(self) -> int:
        """Processes at the same time on all GPUs."""
        return self.workers * max(1, len(self.gpus))
