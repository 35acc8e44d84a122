"""The time of a run of a scan: its trials are in order, whatever happens to the clock."""

from __future__ import annotations

import time
from collections.abc import Callable

_DAY_S = 86400.0
# between what a machine has recorded and the begin of its next run
_TICK_S = 0.001


class RunClock:
    """Seconds since 1970. Within the run they go on as the monotonic clock does, so that a clock
    that is set puts no trial before an older one."""

    def __init__(
        self,
        last: float | None = None,
        *,
        now: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """last: what this machine has recorded last. A run begins after it, if its clock was set
        back by less than a day; what is further ahead was recorded by a wrong clock."""
        self._monotonic = monotonic
        self._begin = monotonic()
        # before 1970 there is no time of a trial
        self.started = max(0.0, now())
        if last is not None and self.started <= last < self.started + _DAY_S:
            self.started = last + _TICK_S

    def __call__(self) -> float:
        return self.started + self._monotonic() - self._begin
