"""The fingerprint of what a run ran on, and when. Imports no torch.

Invariant: asking for a fingerprint initialises no device.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version

from loragate.core.host import usable_cores

_PACKAGES = ("torch", "triton", "numpy", "vllm", "pytest", "pytest-xdist")


def new_run_name() -> str:
    """Sorts by time; two runs that start in one second differ by their process."""
    return f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{os.getpid()}"


def utc_now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def versions() -> Mapping[str, str]:
    """Versions of what can change a result; a package that is not there is left out."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def host() -> Mapping[str, str]:
    return {
        "system": f"{platform.system()} {platform.release()}",
        "processor": platform.processor() or platform.machine(),
        "cores": str(usable_cores()),
        "executable": sys.executable,
    }
