"""Results of a comparison of two builds, their verdict and their record. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from loragate.bench.speed.statistics import Change, Comparison
from loragate.core.resources import Resources
from loragate.core.verdict import ExitCode

SCHEMA = 1


@dataclass(frozen=True, slots=True)
class KernelPair:
    """One specialisation of a kernel in both builds; None where it is missing or does not
    compile."""

    kernel: str
    specialisation: str
    before: Resources | None
    now: Resources | None


@dataclass(frozen=True, slots=True)
class ResourcePairs:
    """The kernels of both builds for `arch`; `problem` says why there are none."""

    arch: str
    kernels: tuple[KernelPair, ...] = ()
    problem: str = ""

    @property
    def changed(self) -> tuple[KernelPair, ...]:
        return tuple(pair for pair in self.kernels if pair.before != pair.now)


@dataclass(frozen=True, slots=True)
class SpeedFigures:
    """`against` is the build that the present one was compared with."""

    kind: str
    against: str
    comparisons: tuple[Comparison, ...]
    resources: ResourcePairs

    def of(self, change: Change) -> tuple[Comparison, ...]:
        return tuple(item for item in self.comparisons if item.change is change)

    @property
    def exit_code(self) -> ExitCode:
        """WRONG for a slow-down, INCOMPLETE where noise may hide one."""
        if self.of(Change.SLOWER):
            return ExitCode.WRONG
        decided = self.comparisons and not self.of(Change.UNDECIDED)
        return ExitCode.OK if decided else ExitCode.INCOMPLETE

    def payload(self) -> dict[str, Any]:
        return {"schema": SCHEMA, **asdict(self)}


def pairs_of(
    before: Sequence[tuple[str, str, Resources | None]],
    now: Sequence[tuple[str, str, Resources | None]],
) -> tuple[KernelPair, ...]:
    """Kernels of two builds by name and specialisation, sorted."""
    old = {(kernel, label): found for kernel, label, found in before}
    new = {(kernel, label): found for kernel, label, found in now}
    return tuple(
        KernelPair(*key, old.get(key), new.get(key)) for key in sorted(old.keys() | new.keys())
    )
