"""Which trials still count: those of the source that some machine runs now. Pure.

Machines of one history may run different sources at the same time, as two that scan in the same
hour at neighbouring commits. Each has a source of its own, which changes with its own trials alone.
A source counts, with all its trials on any machine, as long as one machine runs it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from loragate.history.model import ScanRun

# a machine without a run for so long is gone: a week, and a day for scans of each weekend
_GONE_S = 8 * 86400.0
_NO_DEVICE = ""


class Seen(Protocol):
    """What is needed of a trial."""

    @property
    def run(self) -> str: ...
    @property
    def case(self) -> str: ...
    @property
    def device(self) -> str: ...
    @property
    def path_key(self) -> str: ...


T = TypeVar("T", bound=Seen)


class Source(NamedTuple):
    """What a case ran on a device. path_key: "" where it is not known; then it is what `machine`
    had at that time, otherwise `machine` is ""."""

    case: str
    device: str
    path_key: str
    machine: str


class Ended(NamedTuple, Generic[T]):
    """sources: those that no longer count. again: trials of them that do count, the oldest first:
    those of unknown source from the run in which the new one was traced."""

    sources: tuple[Source, ...] = ()
    again: tuple[T, ...] = ()


_NOTHING: Ended[Any] = Ended()


class Sources(Generic[T]):
    """Kept up with trials, the oldest first. runs: those of the trials."""

    def __init__(self, runs: Iterable[ScanRun]) -> None:
        runs = tuple(runs)
        self._machines = {run.uid: run.machine for run in runs}
        self._gone = _gone(runs)
        # of a case and device the key that each machine has; "" until it is known
        self._now: dict[tuple[str, str], dict[str, str]] = defaultdict(dict)
        # of unknown source, in the last run that has such trials
        self._untraced: dict[tuple[str, str, str], list[T]] = {}

    def of(self, trial: T) -> Source:
        machine = "" if trial.path_key else self._machine(trial)
        return Source(trial.case, trial.device, trial.path_key, machine)

    def ended_by(self, trial: T) -> Ended[T]:
        """To be asked once for each trial, before it is counted."""
        now = self._now[trial.case, trial.device]
        machine = self._machine(trial)
        if not trial.path_key:
            now.setdefault(machine, "")
            self._keep_untraced(trial, machine)
            return _NOTHING
        left = self._left(trial, machine)
        if not left:
            return _NOTHING
        keys = {now.pop(each, "") for each in left} - {""}
        now[machine] = trial.path_key
        ended = [(trial.device, key, "") for key in sorted(keys.difference(now.values()))]
        # a process that dies before any other has ended does not say on which device it was
        devices = dict.fromkeys((trial.device, _NO_DEVICE))
        ended += [(device, "", each) for each in left for device in devices]
        untraced = [
            each
            for device in devices
            for name in left
            for each in self._untraced.pop((trial.case, device, name), ())
            # a run has one source from its begin to its end
            if each.run == trial.run
        ]
        for each in untraced:
            self._keep_untraced(each, machine)
        return Ended(tuple(Source(trial.case, *name) for name in ended), tuple(untraced))

    def _left(self, trial: T, machine: str) -> list[str]:
        """The machines whose source is no longer what it was. A machine that is gone has what it
        had until another one shows what there is now."""
        now = self._now[trial.case, trial.device]
        left = [machine] if now.get(machine) != trial.path_key else []
        if self._gone and machine not in self._gone:
            left += sorted(self._gone & (now.keys() | self._now[trial.case, _NO_DEVICE].keys()))
        return left

    def _keep_untraced(self, trial: T, machine: str) -> None:
        kept = self._untraced.setdefault((trial.case, trial.device, machine), [])
        if kept and kept[0].run != trial.run:
            kept.clear()
        kept.append(trial)

    def _machine(self, trial: T) -> str:
        return self._machines.get(trial.run, "")


def _gone(runs: Iterable[ScanRun]) -> frozenset[str]:
    last: dict[str, float] = {}
    for run in runs:
        last[run.machine] = max(run.started_at, last.get(run.machine, run.started_at))
    newest = max(last.values(), default=0.0)
    return frozenset(machine for machine, at in last.items() if at < newest - _GONE_S)
