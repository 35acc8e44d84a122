"""What the waves of a scan are given, and what they give back."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from loragate.core.gpu_health import HealthReader
from loragate.core.gpus import GpuShare
from loragate.history import History, TrialRecord
from loragate.matrix.case_run import CaseRun
from loragate.nightly.wave import Wanted
from loragate.scan.messages import Measured
from loragate.scan.processes import Processes


@dataclass(frozen=True, slots=True)
class Shown:
    """A trial that has ended: what its process said, and its record. order: all trials of its
    process."""

    wanted: Wanted
    order: tuple[Wanted, ...]
    measured: Measured
    record: TrialRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What the trials of one run of a scan have in common. runs: a run of each case by its id.
    shares: the memory of a worker by the handle of its GPU, where several workers have the same."""

    run: str
    runs: Mapping[str, CaseRun]
    history: History
    processes: Processes
    health: HealthReader
    folder: Path
    clock: Callable[[], float] = time.time
    shares: Mapping[str, GpuShare] = field(default_factory=dict)


@dataclass(slots=True)
class Spent:
    """Seconds of workers.

    starting_s: without a trial, from the start of a process to its first one.
    alone_s: without a trial, while another process ran alone, or waited for the others to end.
    diagnosing: of each trial that a diagnosis made, those before it and beside it included.
    """

    starting_s: float = 0.0
    alone_s: float = 0.0
    diagnosing: list[float] = field(default_factory=list)
