"""What a trial may be run under besides its inputs: one value for each factor that may change a
result and must not. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from enum import StrEnum
from types import MappingProxyType
from typing import Any


class Memory(StrEnum):
    """What a fresh allocation holds."""

    PLAIN = "plain"
    ZEROS = "zeros"
    # NaN, huge indices
    POISON = "poison"


class Cache(StrEnum):
    """Compiled kernels on disk."""

    WARM = "warm"
    COLD = "cold"


class Clock(StrEnum):
    """How fast the clocks of Python run for the code under test."""

    PLAIN = "plain"
    SLOW = "slow"
    FAST = "fast"


class Schedule(StrEnum):
    """How the work of several streams is ordered."""

    PLAIN = "plain"
    # each launch is waited for
    BLOCKING = "blocking"
    # work behind one place of the step is late
    DELAYED = "delayed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditions:
    """neighbours: other processes of the same GPU or CPU that run cases meanwhile. gpu: the value
    of CUDA_VISIBLE_DEVICES, "" on a CPU."""

    memory: Memory = Memory.PLAIN
    cache: Cache = Cache.WARM
    clock: Clock = Clock.PLAIN
    schedule: Schedule = Schedule.PLAIN
    neighbours: int = 0
    gpu: str = ""

    def varied(self) -> dict[str, str]:
        """The factors that are not plain, for a record."""
        return {
            field.name: str(value)
            for field in fields(self)
            if (value := getattr(self, field.name)) != field.default
        }


PLAIN = Conditions()


def conditions_of(varied: Mapping[str, str]) -> Conditions:
    """The conditions that `varied` was made from. ValueError or KeyError for what is no factor."""
    values: dict[str, Any] = {name: _FACTORS[name](value) for name, value in varied.items()}
    return Conditions(**values)


_FACTORS: Mapping[str, Callable[[str], object]] = MappingProxyType(
    {
        "memory": Memory,
        "cache": Cache,
        "clock": Clock,
        "schedule": Schedule,
        "neighbours": int,
        "gpu": str,
    }
)


class Cause(StrEnum):
    """What a result depends on although it must not."""

    # it changes from run to run with nothing varied: atomics, or a race within a kernel
    RUN_TO_RUN = "run to run"
    MEMORY = "uninitialised memory"
    ORDER = "order"
    NEIGHBOUR = "neighbour"
    CLOCK = "clock"
    CACHE = "compile cache"
    SCHEDULE = "stream schedule"
    MACHINE = "machine"
    # several of these at once, and none of them alone
    COMBINATION = "combination"
    # the trial alone decides: the defect shows in every fresh process
    ALWAYS = "always"
    UNKNOWN = "unknown"
