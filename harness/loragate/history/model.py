"""One run of a scan, and one trial of it. Pure; imports no torch and no database."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

# the end of the year 9999, after which there are no dates
LATEST_S = 253_402_300_799.0
# the condition of a trial that names how many other processes ran cases beside it
NEIGHBOURS = "neighbours"


class HistoryError(ValueError):
    """The history cannot be used as it is; the message says which one and why."""


class DatabaseFailedError(Exception):
    """The database of a history does not answer, or failed while it was in use, as when a disk is
    full."""


class Outcome(StrEnum):
    """What one trial has shown."""

    # the judged run passed, or both runs of the process gave the same bits
    RIGHT = "right"
    # the same inputs gave other bits
    DIFFERENT = "different"
    # a wrong answer, a crash or a hang: a defect, however rarely it shows
    WRONG = "wrong"
    # the machine or the harness failed
    INFRA = "infra"
    # nothing could be judged
    UNKNOWN = "unknown"


# of trials that say something about the code
JUDGED = (Outcome.RIGHT, Outcome.DIFFERENT, Outcome.WRONG)


class Purpose(StrEnum):
    """Why a trial was made. Rates count the planned ones alone: the others are made where
    something has been seen, so that they would bias a rate."""

    PLANNED = "planned"
    CONFIRM = "confirm"
    DIAGNOSE = "diagnose"


@dataclass(frozen=True, slots=True, kw_only=True)
class ScanRun:
    """One run of `loragate scan`.

    uid: unique among all machines. started_at and finished_at: seconds since 1970; a run that was
    killed has no end. environment: whatever may change a result besides the code - driver, versions
    of packages, GPUs. commit: "" outside of a checkout.
    """

    uid: str
    machine: str
    started_at: float
    commit: str = ""
    tree: str = "unknown"
    budget_s: float = 0.0
    environment: Mapping[str, str] = field(default_factory=dict)
    finished_at: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialRecord:
    """One trial: case, draw and conditions, and what it has shown.

    run, number: the run and the place in it; together they name the trial.
    case: the run id of the case. path: which code ran, in words; path_key: the hash of its source,
    "" where it is not known. grouped: the class of cases in which rates are counted.
    measure: "bits" for a comparison of bits, "judged" for a run of all oracles.
    promised: whether the subject promises the same bits from run to run.
    digest: of the result, "" where there is none. process: the process of the trial within its run,
    place: its place among the trials of that process.
    conditions: what was varied, by factor; a factor that is not named had its plain value.
    health: of the device during the trial: clocks, temperature, throttling, error counters.
    """

    run: str
    number: int
    at: float
    case: str
    subject: str
    site: str
    path: str
    path_key: str
    grouped: str
    device: str
    draw: int
    measure: str
    purpose: Purpose
    outcome: Outcome
    promised: bool = True
    failure: str = ""
    message: str = ""
    digest: str = ""
    process: int = 0
    place: int = 0
    duration_s: float = 0.0
    replay: str = ""
    cause: str = ""
    conditions: Mapping[str, str] = field(default_factory=dict)
    health: Mapping[str, float] = field(default_factory=dict)


class Glance(NamedTuple):
    """What a plan needs of a trial: its fields of the same names, a small part of a whole record.

    is_alone: no other process ran cases beside it.
    """

    run: str
    case: str
    path: str
    path_key: str
    grouped: str
    device: str
    draw: int
    measure: str
    purpose: Purpose
    outcome: Outcome
    promised: bool
    digest: str
    process: int
    duration_s: float
    cause: str
    is_alone: bool


def glance_at(trial: TrialRecord) -> Glance:
    copied = (getattr(trial, name) for name in Glance._fields[:-1])
    return Glance._make([*copied, NEIGHBOURS not in trial.conditions])


@dataclass(frozen=True, slots=True, kw_only=True)
class PathFiles:
    """The source files that a path runs, by the hash of what they hold; relative to the root of the
    project where they lie in it."""

    path_key: str
    files: tuple[str, ...]
