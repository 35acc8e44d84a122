"""A comparison of two builds as text. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from loragate.bench.speed.figures import KernelPair, SpeedFigures
from loragate.bench.speed.statistics import Change, Comparison
from loragate.bench.text import NONE, columns
from loragate.core.plural import counted
from loragate.core.resources import Resources

_HEADER = ("row", "call", "before", "now", "ratio", "interval", "limit", "")
_KERNEL_HEADER = ("kernel", "specialisation", "registers", "spilled bytes", "shared bytes")
_NAMED = (Change.SLOWER, Change.FASTER, Change.UNDECIDED)


def render_terminal(figures: SpeedFigures) -> str:
    """Every call, then the kernels whose resources changed, then what the run has shown."""
    cells = [_cells(item) for item in figures.comparisons]
    return "\n".join(
        [
            f"this build over {figures.against}, us a call: medians of rounds in turns",
            *columns(_HEADER, cells),
            "",
            *_resource_lines(figures),
            "",
            *summary_lines(figures),
        ]
    )


def summary_lines(figures: SpeedFigures) -> Iterator[str]:
    """What changed and what is undecided, one line each; a single line if everything is as it
    was."""
    for change in _NAMED:
        for item in figures.of(change):
            yield f"{change.value}: {_sentence(item)}"
    unchanged = len(figures.of(Change.UNCHANGED))
    total = len(figures.comparisons)
    kernels = len(figures.resources.changed)
    resources = f"; resources of {counted(kernels, 'kernel')} changed" if kernels else ""
    yield (
        f"bench {figures.kind} against {figures.against}: {unchanged} of {counted(total, 'call')} "
        f"unchanged{resources}"
    )


def _sentence(item: Comparison) -> str:
    text = (
        f"{item.row} {item.call}: {item.before_us:.2f} -> {item.now_us:.2f} us, "
        f"{_percent(item.ratio)} ({_percent(item.low)} to {_percent(item.high)})"
    )
    return f"{text}; noise of this run reaches {_percent(item.limit)}"


def _cells(item: Comparison) -> tuple[str, ...]:
    return (
        item.row,
        item.call,
        f"{item.before_us:.2f}",
        f"{item.now_us:.2f}",
        f"{item.ratio:.4f}",
        f"{item.low:.4f} to {item.high:.4f}",
        f"{item.limit:.4f}",
        "" if item.change is Change.UNCHANGED else item.change.value,
    )


def _resource_lines(figures: SpeedFigures) -> list[str]:
    resources = figures.resources
    if resources.problem:
        return [f"resources of the kernels are not known: {resources.problem}"]
    equal = len(resources.kernels) - len(resources.changed)
    head = f"{counted(equal, 'kernel')} for {resources.arch} with the same resources"
    if not resources.changed:
        return [head]
    return [head, *columns(_KERNEL_HEADER, [_kernel_cells(pair) for pair in resources.changed])]


def _kernel_cells(pair: KernelPair) -> tuple[str, ...]:
    before, now = _figures(pair.before), _figures(pair.now)
    changes = (
        old if old == new else f"{old} -> {new}" for old, new in zip(before, now, strict=True)
    )
    return (pair.kernel, pair.specialisation, *changes)


def _figures(resources: Resources | None) -> tuple[str, str, str]:
    if resources is None:
        return (NONE, NONE, NONE)
    return (str(resources.registers), str(resources.spills), str(resources.shared_bytes))


def _percent(ratio: float) -> str:
    return f"{(ratio - 1) * 100:+.1f} %"
