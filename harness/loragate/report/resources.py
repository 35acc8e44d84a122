"""Resources of compiled kernels next to those of the recorded baseline. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from loragate.core.verdict import Verdict
from loragate.events.model import CompileResult
from loragate.report.wording import growth


@dataclass(frozen=True, slots=True)
class Figure:
    """`change` against the baseline is 0 if none is recorded."""

    value: int
    change: int


@dataclass(frozen=True, slots=True)
class ResourceCell:
    """One artifact; `figures` (registers, spills, shared bytes) are empty if it did not compile."""

    result: CompileResult
    figures: tuple[Figure, ...]

    @property
    def remarkable(self) -> bool:
        grew = any(figure.change > 0 for figure in self.figures)
        return grew or self.result.verdict is not Verdict.PASS


@dataclass(frozen=True, slots=True)
class ResourceRow:
    """One specialisation of one kernel; `cells` are in the order of the table's `archs`."""

    subject: str
    kernel: str
    specialisation: str
    cells: tuple[ResourceCell | None, ...]

    @property
    def remarkable(self) -> bool:
        return any(cell is not None and cell.remarkable for cell in self.cells)


@dataclass(frozen=True, slots=True)
class ResourceTable:
    """`remarkable` rows grew, or did not compile; `calm` rows are all others."""

    archs: tuple[str, ...]
    remarkable: tuple[ResourceRow, ...]
    calm: tuple[ResourceRow, ...]


def resource_table(results: Sequence[CompileResult]) -> ResourceTable | None:
    """None if nothing was compiled."""
    if not results:
        return None
    archs = tuple(sorted({result.arch for result in results}, key=lambda a: (len(a), a)))
    groups: dict[tuple[str, str, str], dict[str, CompileResult]] = defaultdict(dict)
    for result in results:
        groups[result.subject, result.kernel, result.specialisation][result.arch] = result
    rows = [
        ResourceRow(*key, tuple(_cell(group.get(arch)) for arch in archs))
        for key, group in sorted(groups.items())
    ]
    return ResourceTable(
        archs=archs,
        remarkable=tuple(row for row in rows if row.remarkable),
        calm=tuple(row for row in rows if not row.remarkable),
    )


def _cell(result: CompileResult | None) -> ResourceCell | None:
    if result is None or result.resources is None:
        return None if result is None else ResourceCell(result, ())
    now = result.resources
    values = (now.registers, now.spills, now.shared_bytes)
    changes = growth(now, result.baseline) or (0, 0, 0)
    return ResourceCell(result, tuple(map(Figure, values, changes)))
