"""SIGTERM and SIGHUP end a command as Ctrl-C does, so that it stops what it has started.

By default Python dies of either without running a `finally`. The processes that a command watches
are in groups of their own, which no signal of a terminal reaches, and would never be stopped.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_ENDING = (signal.SIGTERM, signal.SIGHUP)


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """Within, SIGTERM and SIGHUP raise KeyboardInterrupt in the main thread, once."""
    if threading.current_thread() is not threading.main_thread():
        # only the main thread may install handlers, and only it is interrupted by signals
        yield
        return
    raised = False

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal raised
        if not raised:
            # a second one, as a closing terminal sends, must not cut the clean-up short
            raised = True
            raise KeyboardInterrupt

    # nohup ignores SIGHUP on purpose
    heeded = [n for n in _ENDING if signal.getsignal(n) is not signal.SIG_IGN]
    before = {number: signal.signal(number, interrupt) for number in heeded}
    try:
        yield
    finally:
        for number, handler in before.items():
            # None is a handler that was not installed from Python, and cannot be put back
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
