"""What the workers of a GPU share: memory, of which a large case waits for the reserve before it
begins, and the device itself, which some cases are known to lose."""

from __future__ import annotations

import os
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from loragate.core.files import lock_of
from loragate.core.gpus import share_of_gpu
from loragate.execution.device_memory import TorchAllocator, WorkerMemory
from loragate.matrix.footprint import footprint_bytes
from loragate.plugin.collection import case_run_of, loses_device, num_first
from loragate.plugin.options import SETTINGS, Role
from loragate.plugin.running_order import workers_of
from loragate.plugin.turns import DeviceTurns

# how many workers share the worker's GPU, the bytes that were free on it before the first of them
# started (0: unknown), and the bytes that the largest of all cases needs
WORKER_INPUT_SHARING = "loragate_gpu_sharing"
WORKER_INPUT_FREE = "loragate_gpu_free"
WORKER_INPUT_LARGEST = "loragate_largest_case"


MEMORY = pytest.StashKey[WorkerMemory]()
TURNS = pytest.StashKey[DeviceTurns]()


def pytest_sessionstart(session: pytest.Session) -> None:
    settings = session.config.stash[SETTINGS]
    given: dict[str, Any] = getattr(session.config, "workerinput", {})
    if settings.role is not Role.WORKER or WORKER_INPUT_SHARING not in given:
        return
    import torch

    if torch.cuda.is_available():
        allocator = TorchAllocator()
        # what is free now would be wrong: it depends on which workers have started
        free = given[WORKER_INPUT_FREE] or allocator.total
        share = share_of_gpu(free, given[WORKER_INPUT_SHARING], given[WORKER_INPUT_LARGEST])
        gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        # one for each run and GPU
        lock = lock_of(Path(settings.run, gpu))
        session.config.stash[MEMORY] = WorkerMemory(share, lock, allocator)
        begun = Path(lock_of(Path(settings.run)).lock_file).with_suffix(".begun")
        session.config.stash[TURNS] = DeviceTurns(Path(lock.lock_file), begun)


def pytest_collection_finish(session: pytest.Session) -> None:
    turns = session.config.stash.get(TURNS, None)
    if turns is not None:
        runs = [run for run in map(case_run_of, session.items) if run is not None]
        # ordinary tests come between the pieces that the order was made for
        is_in_order = len(runs) == len(session.items)
        first = num_first(runs, session.config, workers_of(session.config))
        turns.wait_first_for(first if is_in_order else 0)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    run, memory = case_run_of(item), item.config.stash.get(MEMORY, None)
    if run is None or memory is None:
        return (yield)
    turns = item.config.stash[TURNS]
    is_listed = loses_device(item.config, run.run_id)
    turn = turns.loses_device() if is_listed else turns.shares_device()
    # the turn first: a case that waits for the device alone keeps no memory from others
    with turn, memory.reserve(footprint_bytes(run.case)):
        return (yield)
