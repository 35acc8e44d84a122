"""A case that hangs is killed at its own deadline, with the stack of every thread.

Workers dump the stacks to a file that the controller reads; a session without workers dumps them to
stderr.
"""

from __future__ import annotations

import faulthandler
import os
from collections.abc import Generator
from contextlib import suppress
from typing import IO

import pytest

from loragate.core.deadline import deadline, open_crash_file
from loragate.plugin.collection import case_run_of
from loragate.plugin.options import SETTINGS, Role, Settings

_STACKS = pytest.StashKey[IO[bytes]]()


def pytest_unconfigure(config: pytest.Config) -> None:
    stacks = config.stash.get(_STACKS, None)
    if stacks is not None:
        faulthandler.disable()
        stacks.close()


# not tryfirst: waiting for memory must not count against the deadline
@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    run = case_run_of(item)
    if run is None:
        return (yield)
    with deadline(run.case.timeout_s, stacks_of(item.config)):
        return (yield)


def stacks_of(config: pytest.Config) -> IO[bytes]:
    """Where this process dumps its stacks."""
    # opened by the first case only: without cases there is no report
    if _STACKS not in config.stash:
        config.stash[_STACKS] = _open_stacks(config.stash[SETTINGS])
    return config.stash[_STACKS]


def _open_stacks(settings: Settings) -> IO[bytes]:
    if settings.role is not Role.ALONE:
        # a full disk costs the stacks of a crash, not the case
        with suppress(OSError):
            return open_crash_file(settings.stack_file(settings.worker))
    # a copy, because pytest captures the original while the test runs
    return os.fdopen(os.dup(2), "wb", buffering=0)
