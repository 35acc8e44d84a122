"""Figures as text: for the terminal and, from a record, as the README's table. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from loragate.bench.figures import Bar, DenseFigures, StepFigures
from loragate.bench.rows import LINEARS

_NONE = "-"


def render_terminal(figures: DenseFigures) -> str:
    """Everything that was measured, as aligned columns."""
    copied = figures.copy_bytes_per_s / 1e12
    return "\n".join(
        [
            "dense LoRA, us a call: median of CUDA-graph replays; + is what LoRA adds to the base",
            *_aligned(_header(figures), _lines(figures)),
            f"floor at 4.3 TB/s; this machine copies {copied:.2f} TB/s (read + written)",
            "",
            "metadata of one step, us, from a mapping on the CPU (8 slots)",
            *_aligned(_STEP_HEADER, [_step_cells(step) for step in figures.steps]),
            "",
            *(render_bar(bar) for bar in figures.bars()),
        ]
    )


def render_bar(bar: Bar) -> str:
    measured = _NONE if bar.measured is None else f"{bar.measured:.3f}"
    note = f" ({bar.note})" if bar.note else ""
    return f"{bar.verdict.value:<12} {bar.name}: {measured}, bar {bar.target}{note}"


def render_markdown(figures: DenseFigures) -> str:
    """The compact table of the README: one line a row, then the bars."""
    header = _header(figures)
    rule = ["---", *(["--:"] * (len(header) - 1))]
    bars = [
        f"* {bar.name}: **{_NONE if bar.measured is None else f'{bar.measured:.2f}'}** "
        f"(bar {bar.target}{', ' + bar.note if bar.note else ''})"
        for bar in figures.bars()
    ]
    rows = [header, rule, *_lines(figures)]
    return "\n".join(["| " + " | ".join(cells) + " |" for cells in rows] + ["", *bars])


def _header(figures: DenseFigures) -> list[str]:
    added = [f"+{subject}" for subject in figures.subjects]
    return ["site", "M", "rank", "base", *added, "ratio", "floor", "over floor"]


def _lines(figures: DenseFigures) -> list[list[str]]:
    lines, last = [], ""
    for row, ratio in zip(figures.rows, figures.ratios(), strict=True):
        shape, linear = LINEARS[row.row.linear], row.row.linear
        widths = "+".join(map(str, shape.slices))
        lines.append(
            [
                "" if linear == last else f"{linear} {shape.in_features} -> {widths}",
                str(row.row.tokens),
                str(row.row.rank),
                f"{row.base_us:.1f}",
                *(f"{row.added_us(subject):.1f}" for subject in figures.subjects),
                _NONE if ratio is None else f"{ratio:.2f}",
                f"{row.floor_us():.1f}",
                f"{row.over_floor(figures.candidate):.1f}",
            ]
        )
        last = linear
    return lines


_STEP_HEADER = ["subject", "M", "active", "host", "total", "device"]


def _step_cells(step: StepFigures) -> list[str]:
    device = _NONE if step.device_us is None else f"{step.device_us:.1f}"
    times = [f"{step.host_us:.1f}", f"{step.total_us:.1f}", device]
    return [step.subject, str(step.tokens), str(step.active), *times]


def _aligned(header: Sequence[str], lines: Sequence[Sequence[str]]) -> list[str]:
    """First column to the left, the others to the right."""
    table = [header, *lines]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if index == 0 else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ).rstrip()
        for cells in table
    ]
