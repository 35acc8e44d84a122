"""What a scan ran on, as far as it may change a result, and what of it changed. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from loragate.history.model import ScanRun

# of these other bits are no surprise
_CHANGES_BITS = ("torch", "triton", "numpy", "vllm", "driver", "gpu", "processor", "device")
_SEPARATOR = "\x1f"


@dataclass(frozen=True, slots=True, order=True)
class Change:
    """of: the machine. before, after: "" for what was not there."""

    machine: str
    name: str
    before: str
    after: str


def environment_key(environment: Mapping[str, str]) -> str:
    """Equal where equal inputs must give equal bits."""
    return _SEPARATOR.join(environment.get(name, "") for name in _CHANGES_BITS)


def changes(runs: Sequence[ScanRun]) -> tuple[Change, ...]:
    """What is not the same in the last run of each machine as in the one before it."""
    found: list[Change] = []
    last: dict[str, ScanRun] = {}
    previous: dict[str, ScanRun] = {}
    for run in sorted(runs, key=lambda run: run.started_at):
        if run.machine in last:
            previous[run.machine] = last[run.machine]
        last[run.machine] = run
    for machine, before in previous.items():
        found += differences(machine, before.environment, last[machine].environment)
    return tuple(sorted(found))


def differences(
    machine: str, before: Mapping[str, str], after: Mapping[str, str]
) -> Iterable[Change]:
    for name in sorted(before.keys() | after.keys()):
        old, new = before.get(name, ""), after.get(name, "")
        if old != new:
            yield Change(machine, name, old, new)
