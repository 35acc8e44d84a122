"""Cores and memory of the host that this process may use. Imports no torch."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

_CGROUP_QUOTA = Path("/sys/fs/cgroup/cpu.max")


def usable_cores() -> int:
    """Cores that the scheduler and the container grant, at least one."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(1, min(cores or 1, _cgroup_cores(_CGROUP_QUOTA) or cores or 1))


def free_host_bytes() -> int:
    """Memory that can be had without swapping."""
    return psutil.virtual_memory().available


@contextmanager
def on_cores(cores: Collection[int]) -> Iterator[None]:
    """What this thread starts within uses these cores alone and counts no others; without any, all
    that it may use itself."""
    if not cores:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _cgroup_cores(path: Path) -> int | None:
    """Whole cores of a container's CPU quota; None without one."""
    try:
        quota, period = path.read_text().split()
    except (OSError, ValueError):
        return None
    return None if quota == "max" else max(1, int(quota) // int(period))
