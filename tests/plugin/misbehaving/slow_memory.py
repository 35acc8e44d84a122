"""A plugin whose worker waits for memory longer than any of its cases may take."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from loragate.plugin.memory import MEMORY


class _Busy:
    @contextmanager
    def reserve(self, case_bytes: int) -> Iterator[None]:
        time.sleep(2.5)
        yield


def pytest_sessionstart(session: pytest.Session) -> None:
    session.config.stash[MEMORY] = _Busy()  # type: ignore[assignment]
