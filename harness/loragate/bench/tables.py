"""Figures of `bench dense` as text: for the terminal and, from a record, as a Markdown
table. Pure."""

from __future__ import annotations

from loragate.bench.figures import DenseFigures, StepFigures, Times
from loragate.bench.rows import linear_of
from loragate.bench.text import bar_line, columns, markdown, number


def render_terminal(figures: DenseFigures) -> str:
    """Everything that was measured, as aligned columns."""
    copied = figures.copy_bytes_per_s / 1e12
    return "\n".join(
        [
            "dense LoRA, us a call: median of CUDA-graph replays; + is what LoRA adds to the base"
            + (", behind `cold` with none of the operands in the L2 cache" * _has_cold(figures)),
            *columns(_header(figures), _lines(figures)),
            f"floor at 4.3 TB/s; this machine copies {copied:.2f} TB/s (read + written)",
            "",
            "metadata of one step, us, from a mapping on the CPU (8 slots)",
            *columns(_STEP_HEADER, [_step_cells(step) for step in figures.steps]),
            "",
            *map(bar_line, figures.bars()),
        ]
    )


def render_markdown(figures: DenseFigures) -> str:
    """A compact table: one line per row."""
    return "\n".join(markdown(_header(figures), _lines(figures)))


def _header(figures: DenseFigures) -> list[str]:
    added = [f"+{subject}" for subject in figures.subjects]
    header = ["site", "M", "rank", "base", *added, "ratio", "floor", "over floor"]
    return header + (["cold: base", *added, "ratio"] if _has_cold(figures) else [])


def _has_cold(figures: DenseFigures) -> bool:
    return any(row.cold for row in figures.rows)


def _cold_cells(figures: DenseFigures, times: Times | None) -> list[str]:
    if times is None:
        return [""] * (2 + len(figures.subjects))
    added = (f"{times.added_us(subject):.1f}" for subject in figures.subjects)
    ratio = times.ratio(figures.candidate, figures.baseline)
    return [f"{times.base_us:.1f}", *added, number(ratio, 2)]


def _lines(figures: DenseFigures) -> list[list[str]]:
    lines, last = [], ""
    for row, ratio in zip(figures.rows, figures.ratios(), strict=True):
        shape, linear = linear_of(row.row.linear), row.row.linear
        widths = "+".join(map(str, shape.slices))
        lines.append(
            [
                "" if linear == last else f"{linear} {shape.in_features} -> {widths}",
                str(row.row.tokens),
                str(row.row.rank),
                f"{row.base_us:.1f}",
                *(f"{row.added_us(subject):.1f}" for subject in figures.subjects),
                number(ratio, 2),
                f"{row.floor_us():.1f}",
                f"{row.over_floor(figures.candidate):.1f}",
                *(_cold_cells(figures, row.cold) if _has_cold(figures) else []),
            ]
        )
        last = linear
    return lines


_STEP_HEADER = ["subject", "M", "active", "host", "total", "device"]


def _step_cells(step: StepFigures) -> list[str]:
    times = [number(step.host_us), number(step.total_us), number(step.device_us)]
    return [step.subject, str(step.tokens), str(step.active), *times]
