"""Tables and bars as text, for a terminal and for Markdown. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from loragate.bench.bars import Bar
from loragate.core.verdict import Verdict

NONE = "-"
_PREFIXES: Mapping[Verdict, str] = {
    Verdict.PASS: "",
    Verdict.FAIL: "missed: ",
    Verdict.INCONCLUSIVE: "not measured: ",
}


def columns(header: Sequence[str], lines: Sequence[Sequence[str]]) -> list[str]:
    """Lines of aligned columns: the first to the left, the others to the right."""
    table = [header, *lines]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if index == 0 else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ).rstrip()
        for cells in table
    ]


def markdown(header: Sequence[str], lines: Sequence[Sequence[str]]) -> list[str]:
    rule = ["---", *(["--:"] * (len(header) - 1))]
    return ["| " + " | ".join(cells) + " |" for cells in (header, rule, *lines)]


def number(value: float | None, digits: int = 1) -> str:
    return NONE if value is None else f"{value:.{digits}f}"


def measured(bar: Bar) -> str:
    """With a digit more than targets have: one that is just missed must not look met."""
    return number(bar.measured, 3)


def bar_line(bar: Bar) -> str:
    note = f" ({bar.note})" if bar.note else ""
    return f"{bar.verdict.value:<12} {bar.name}: {measured(bar)}, bar {bar.target}{note}"


def markdown_bars(bars: Iterable[Bar]) -> list[str]:
    return [
        f"* {bar.name}: **{measured(bar)}** "
        f"({_PREFIXES[bar.verdict]}bar {bar.target}{', ' + bar.note if bar.note else ''})"
        for bar in bars
    ]
