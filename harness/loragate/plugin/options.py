"""The `--loragate-...` options, and the role of a process in a distributed session.

Invariant: kernels are only imported after `select_interpreter`, and only processes that run tests
call it, so that the controller stays free of torch and of CUDA.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path
from typing import Any

import pytest

from loragate.core.arguments import count_from, path_of
from loragate.core.checkout import data_root
from loragate.core.machine import select_interpreter
from loragate.core.versions import new_run_name
from loragate.events.durations import durations_of
from loragate.matrix.case import Tier
from loragate.matrix.load import default_files, named_files
from loragate.matrix.selection import Selection
from loragate.matrix.shards import Durations, Shard, shard_numbers
from loragate.run.folder import EVENTS, WORKERS

WORKER_INPUT_RUN = "loragate_run"


class Role(Enum):
    # runs tests itself
    ALONE = auto()
    # hands tests to workers
    CONTROLLER = auto()
    WORKER = auto()


class Ownership(Enum):
    # pytest was called directly: it starts the run and closes it
    OWNED = auto()
    # the gate started the run; pytest is one of its legs
    JOINED = auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """`run` names the run in every event; `report` is the folder of its events. `leg` is set where
    the session is a leg whose workers may run beside those of the cases, which have equal names.
    `excuses`: whether a case that fails as a finding lists it passes; not so with --runxfail."""

    selection: Selection
    report: Path
    run: str
    role: Role
    ownership: Ownership
    worker: str
    leg: str = ""
    excuses: bool = True

    @property
    def events(self) -> Path:
        return self.report / EVENTS

    def stack_file(self, worker: str) -> Path:
        """Where the watchdog of a worker writes its stacks."""
        return self.report / WORKERS / self.leg / f"{worker}.stack"


SETTINGS = pytest.StashKey[Settings]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("loragate", "correctness gate for multi-LoRA kernels")
    group.addoption(
        "--loragate-subject",
        action="append",
        metavar="NAME",
        help="Implementation to check: a name or module:object. Repeatable (default: lorakernels)",
    )
    group.addoption(
        "--loragate-tier",
        choices=[tier.value for tier in Tier],
        default=Tier.SMOKE.value,
        help="Which cases to run (default: smoke)",
    )
    group.addoption(
        "--loragate-draw",
        action="append",
        type=count_from(0),
        metavar="N",
        help="Use the random data of draw N. Repeatable (default: 0)",
    )
    group.addoption(
        "--loragate-repeats",
        type=count_from(1),
        default=1,
        metavar="N",
        help="Run each draw N times (default: 1)",
    )
    group.addoption(
        "--loragate-cases",
        action="append",
        metavar="PATTERN",
        default=[],
        help="Only run cases whose id has these pieces, as in dense_delta.tokens-6, or matches "
        "this shell pattern. Repeatable (default: all)",
    )
    group.addoption(
        "--loragate-matrix",
        action="append",
        type=_path,
        metavar="PATH",
        help="YAML file of cases, or a folder of them. Repeatable (default: cases/*.yaml)",
    )
    group.addoption(
        "--loragate-shard",
        type=shard_numbers,
        metavar="I/N",
        help="Only run part I of N, the same on every machine; `loragate merge` joins the reports",
    )
    group.addoption(
        "--loragate-durations",
        type=_path,
        metavar="REPORT",
        help="Balance the shards, and the workers, by what an earlier report took",
    )
    group.addoption(
        "--loragate-report",
        type=_path,
        metavar="DIR",
        default="report",
        help="Folder of the report (default: report). An earlier report moves to DIR/previous.",
    )
    group.addoption(
        "--loragate-run",
        metavar="ID",
        help="Append to the run that the gate has started instead of starting one",
    )


def _path(text: str) -> str:
    """Relative to the folder that pytest was called in, wherever the root of its session is."""
    # workers are sent options, which cannot be paths
    return str(path_of(text).absolute())


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    settings = _settings(config)
    config.stash[SETTINGS] = settings
    if settings.role is not Role.CONTROLLER:
        select_interpreter()


def selection_of(config: pytest.Config) -> Selection:
    """What the command line selects; the same in every process of a session."""
    option = config.option
    return Selection(
        matrix=_matrix(config),
        subjects=_unique(option.loragate_subject or ["lorakernels"]),
        tier=Tier(option.loragate_tier),
        draws=_unique(option.loragate_draw or [0]),
        repeats=option.loragate_repeats,
        patterns=_unique(option.loragate_cases),
        shard=_shard(config),
    )


def recorded_durations(config: pytest.Config) -> Durations:
    """Raises EventsError, a ValueError."""
    named = config.option.loragate_durations
    return durations_of(Path(named) if named else None)


def _shard(config: pytest.Config) -> Shard | None:
    option = config.option
    if option.loragate_shard is None:
        return None
    index, count = option.loragate_shard
    durations = recorded_durations(config)
    return Shard(index=index, count=count, durations=durations, of_gate=bool(option.loragate_run))


def _settings(config: pytest.Config) -> Settings:
    worker_input: dict[str, Any] = getattr(config, "workerinput", {})
    joined: str | None = config.option.loragate_run
    return Settings(
        selection=selection_of(config),
        report=Path(config.option.loragate_report),
        run=worker_input.get(WORKER_INPUT_RUN) or joined or new_run_name(),
        role=_role(config),
        ownership=Ownership.JOINED if joined else Ownership.OWNED,
        worker=worker_input.get("workerid", "main"),
        excuses=not config.option.runxfail,
    )


def _role(config: pytest.Config) -> Role:
    if hasattr(config, "workerinput"):
        return Role.WORKER
    distributed = config.getoption("dist", "no") != "no" and bool(config.getoption("tx", []))
    return Role.CONTROLLER if distributed else Role.ALONE


def _matrix(config: pytest.Config) -> tuple[Path, ...]:
    named: Sequence[str] | None = config.option.loragate_matrix
    if named:
        return named_files(map(Path, named))
    return default_files(config.rootpath) or default_files(data_root())


def _unique(values: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(dict.fromkeys(values))
