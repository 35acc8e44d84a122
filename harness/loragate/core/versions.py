"""What a run ran on, and when: name, time, package versions, host. Imports no torch.

Invariant: nothing here initialises a device.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import PackageNotFoundError, version

from loragate.core.host import usable_cores

_PACKAGES = ("torch", "triton", "numpy", "vllm", "pytest", "pytest-xdist")


def new_run_name() -> str:
    """A name that sorts by time; runs that start in the same second differ by process id."""
    return f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{os.getpid()}"


def utc_now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def versions() -> Mapping[str, str]:
    """Versions of packages that can change a result; one that is not installed is left out."""
    return dict(_versions())


@cache
def _versions() -> tuple[tuple[str, str], ...]:
    # a record that grows asks for them again and again
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return tuple(found.items())


def host() -> Mapping[str, str]:
    return {
        "system": f"{platform.system()} {platform.release()}",
        "processor": platform.processor() or platform.machine(),
        "cores": str(usable_cores()),
        "executable": sys.executable,
    }
