"""Workers: how many, and which GPU each one gets.

Invariant: a worker's GPU is set in its environment before it starts, and a replacement gets the
GPU of the worker that it replaces.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from loragate.core.gpus import (
    WITHOUT_MPS,
    DriverError,
    ListedGpu,
    free_bytes_of,
    list_gpus,
    visible_gpus,
    worker_count,
    workers_per_gpu,
)
from loragate.core.host import free_host_bytes, usable_cores
from loragate.core.machine import interpreter_is_on
from loragate.core.verdict import ExitCode
from loragate.matrix.footprint import footprint_bytes
from loragate.plugin.collection import asks_for_cases_alone, num_first, selected_trials
from loragate.plugin.memory import WORKER_INPUT_FREE, WORKER_INPUT_LARGEST, WORKER_INPUT_SHARING
from loragate.plugin.options import SETTINGS, WORKER_INPUT_RUN, selection_of
from loragate.plugin.running_order import WORKER_INPUT_GPUS, Workers, begin_alone

_LARGEST = pytest.StashKey[int]()
_LISTED = pytest.StashKey[tuple[ListedGpu, ...]]()


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    option = config.option
    if not getattr(option, "numprocesses", None) and not getattr(option, "tx", None):
        return
    if option.dist in ("loadscope", "loadfile", "loadgroup", "each"):
        raise pytest.UsageError(
            f"--dist {option.dist} does not survive a worker that dies (pytest-xdist #1323); "
            "use --dist worksteal"
        )
    if option.dist == "no":
        option.dist = "worksteal"
    if option.maxworkerrestart is None:
        # every restart costs the one case that killed its worker, so their number is bounded;
        # `accounting` ends a session whose workers die before they run anything
        option.maxworkerrestart = "1000000"


@pytest.hookimpl(optionalhook=True, tryfirst=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int | None:
    if "PYTEST_XDIST_AUTO_NUM_WORKERS" in os.environ:
        # xdist reads this variable itself
        return None
    handles = _gpus_of_workers(config)
    listed = _listed_gpus(config)
    per_gpu = workers_per_gpu(handles, listed, _largest_case(config)) if handles else 1
    most = worker_count(len(handles), per_gpu, usable_cores(), free_host_bytes())
    return max(1, min(most, _selected(config))) if asks_for_cases_alone(config) else most


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config, specs: Sequence[Any]) -> None:
    threads = max(1, usable_cores() // len(specs))
    handles = _gpus_of_workers(config)
    losing = begin_alone(_num_first(config, len(specs)), len(specs)) if handles else ()
    for position, spec in enumerate(specs):
        if "OMP_NUM_THREADS" not in os.environ:
            spec.env.setdefault("OMP_NUM_THREADS", str(threads))
        if handles:
            spec.env["CUDA_VISIBLE_DEVICES"] = handles[position % len(handles)]
        if position in losing:
            spec.env |= WITHOUT_MPS


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    # the worker has it by now, and a replacement begins with another case
    for name in WITHOUT_MPS:
        node.gateway.spec.env.pop(name, None)
    node.workerinput[WORKER_INPUT_RUN] = node.config.stash[SETTINGS].run
    handles = _gpus_of_workers(node.config)
    node.workerinput[WORKER_INPUT_GPUS] = max(1, len(handles))
    specs = node.nodemanager.specs
    gpu = node.gateway.spec.env.get("CUDA_VISIBLE_DEVICES")
    sharing = sum(spec.env.get("CUDA_VISIBLE_DEVICES") == gpu for spec in specs)
    if gpu and sharing > 1:
        node.workerinput[WORKER_INPUT_SHARING] = sharing
        node.workerinput[WORKER_INPUT_FREE] = free_bytes_of(gpu, _listed_gpus(node.config))
        node.workerinput[WORKER_INPUT_LARGEST] = _largest_case(node.config)


def _gpus_of_workers(config: pytest.Config) -> tuple[str, ...]:
    """Their handles: no GPU where the interpreter runs the kernels, as in the leg of host tests,
    whatever CUDA_VISIBLE_DEVICES names."""
    return () if interpreter_is_on() else visible_gpus(os.environ, _listed_gpus(config))


def _listed_gpus(config: pytest.Config) -> tuple[ListedGpu, ...]:
    """The GPUs as they were before the first worker took memory: the number of workers and their
    memory are derived from the same figures."""
    if _LISTED not in config.stash:
        try:
            config.stash[_LISTED] = list_gpus(os.environ)
        except DriverError as error:
            # too early for pytest.exit, which needs a session
            print(error, file=sys.stderr)
            os._exit(ExitCode.INFRASTRUCTURE.value)
    return config.stash[_LISTED]


def _num_first(config: pytest.Config, workers: int) -> int:
    """How many workers begin with a case that is listed to lose the device."""
    try:
        runs = selected_trials(config, selection_of(config))
    except ValueError:
        return 0
    return num_first(runs, config, Workers(workers, 1))


def _selected(config: pytest.Config) -> int:
    """How many runs are selected; 0 if the case files cannot be read."""
    try:
        return len(selected_trials(config, selection_of(config)))
    except ValueError:
        return 0


def _largest_case(config: pytest.Config) -> int:
    """Bytes that the largest selected case needs; 0 if the case files cannot be read, which the
    workers will report."""
    if _LARGEST not in config.stash:
        # other draws have other data of the same size
        selection = replace(selection_of(config), draws=(0,), repeats=1)
        try:
            runs = selected_trials(config, selection)
        except ValueError:
            return 0
        config.stash[_LARGEST] = max((footprint_bytes(run.case) for run in runs), default=0)
    return config.stash[_LARGEST]
