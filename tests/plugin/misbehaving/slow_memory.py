"""A plugin whose worker waits for memory longer than any of its cases may take."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest

from loragate.plugin.memory import MEMORY, TURNS


class _Busy:
    @contextmanager
    def reserve(self, case_bytes: int) -> Iterator[None]:
        time.sleep(2.5)
        yield

    def wait_first_for(self, cases: int) -> None:
        pass

    def shares_device(self) -> AbstractContextManager[None]:
        return nullcontext()


def pytest_sessionstart(session: pytest.Session) -> None:
    config: Any = session.config
    config.stash[MEMORY] = config.stash[TURNS] = _Busy()
