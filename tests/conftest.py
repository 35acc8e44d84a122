"""What tests of several folders share."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest


@pytest.fixture
def heeded_signals() -> Iterator[None]:
    """Signals that end a process do so, also where whoever started the tests ignores them, as
    nohup and a shell's background jobs do. Processes that a test starts inherit that."""
    numbers = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)
    before = {number: signal.getsignal(number) for number in numbers}
    for number, handler in before.items():
        if handler is signal.SIG_IGN:
            heeded = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
            signal.signal(number, heeded)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)
