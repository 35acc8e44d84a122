"""SIGTERM and SIGHUP end a command as Ctrl-C does, so that it stops what it has started.

By default Python dies of either without running a `finally`. The processes that a command watches
are in groups of their own, which no signal of a terminal reaches, and would never be stopped.
While one of them is being started, `signals_deferred` holds all of these signals back.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType

_ENDING = (signal.SIGTERM, signal.SIGHUP)
_DEFERRED = (signal.SIGINT, *_ENDING)


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

    with _handled_by(interrupt, _ENDING):
        yield


@contextmanager
def signals_deferred() -> Iterator[None]:
    """Within, SIGINT, SIGTERM and SIGHUP wait; they take effect at the end, in their order.

    A handler that raises while a process is being started would lose the process: it runs already,
    and nobody holds its number.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    arrived: list[int] = []
    # no mask of the thread: a process that is started would inherit it
    try:
        with _handled_by(lambda number, frame: arrived.append(number), _DEFERRED):
            yield
    finally:
        for number in arrived:
            signal.raise_signal(number)


@contextmanager
def _handled_by(
    handler: Callable[[int, FrameType | None], None], numbers: Iterable[signal.Signals]
) -> Iterator[None]:
    # nohup ignores SIGHUP on purpose
    heeded = [n for n in numbers if signal.getsignal(n) is not signal.SIG_IGN]
    before = {number: signal.signal(number, handler) for number in heeded}
    try:
        yield
    finally:
        for number, former in before.items():
            # None is a handler that was not installed from Python, and cannot be put back
            signal.signal(number, signal.SIG_DFL if former is None else former)
