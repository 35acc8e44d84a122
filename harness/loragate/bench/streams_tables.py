"""Figures of `bench streams` as text: for the terminal and, from a record, as Markdown
tables. Pure."""

from __future__ import annotations

from loragate.bench.moe_rows import LAYER_RANK
from loragate.bench.rows import LINEARS
from loragate.bench.streams_figures import StreamFigures
from loragate.bench.streams_measured import FormTimes, GDNFigures, LinearFigures
from loragate.bench.streams_rows import (
    GDN_FORMS,
    GDN_RANK,
    GDN_SHAPES,
    LINEAR_FORMS,
    MOE_FORMS,
)
from loragate.bench.text import bar_line, columns, markdown, number

Table = tuple[list[str], list[list[str]]]
_CHOSEN = "* the form that the plan takes with the switch on"


def render_terminal(figures: StreamFigures) -> str:
    """Everything that was measured, as aligned columns."""
    return "\n".join(
        [
            "linear layers, us a call: median of CUDA-graph replays; + is what LoRA adds to the "
            "base",
            *columns(*_linears(figures)),
            f"{_CHOSEN}; {_drawn(figures)}",
            *_best_lines(figures),
            "",
            f"input projections of a gated delta net, us a call; LoRA of rank {GDN_RANK}",
            *columns(*_gdns(figures)),
            "",
            f"MoE layers of Qwen3-30B-A3B, us a call; LoRA of rank {LAYER_RANK}",
            *columns(*_moes(figures)),
            "",
            *map(bar_line, figures.bars()),
        ]
    )


def render_markdown(figures: StreamFigures) -> str:
    """One table each for linear layers, for input projections and for MoE layers."""
    return "\n".join(
        [
            *markdown(*_linears(figures)),
            "",
            f"`*` {_CHOSEN.removeprefix('* ')}; {_drawn(figures)}.",
            "",
            *(f"* {line}" for line in _best_lines(figures)),
            "",
            *markdown(*_gdns(figures)),
            "",
            *markdown(*_moes(figures)),
        ]
    )


def _drawn(figures: StreamFigures) -> str:
    drawn = len(figures.linears) - len(figures.listed)
    return f"{drawn} rows were drawn from seed {figures.seed}" if drawn else "no row was drawn"


def _best_lines(figures: StreamFigures) -> list[str]:
    """Where the second stream gains most, layer by layer."""
    lines = []
    for layer in LINEARS:
        best = figures.best_dual(layer)
        if best is not None:
            lines.append(
                f"{layer}: with two streams LoRA adds {number(best.dual_ratio, 2)} of what the "
                f"best form of one stream adds at M={best.row.tokens}, rank {best.row.rank}, and "
                "more elsewhere"
            )
    return lines


def _linears(figures: StreamFigures) -> Table:
    theirs = figures.baseline
    header = ["layer", "M", "rank", "base", *(f"+{form}" for form in LINEAR_FORMS), "+planned"]
    if theirs:
        header += [f"+{theirs}", f"+{theirs} dual", "ratio"]
    header.append("planned / one stream")
    lines, last = [], ""
    for linear in figures.linears:
        name = _layer(linear)
        cells = _linear_cells(linear, with_baseline=theirs is not None)
        lines.append(["" if name == last else name, *cells])
        last = name
    return header, lines


def _layer(linear: LinearFigures) -> str:
    row = linear.row
    widths = "+".join(map(str, row.shape.slices))
    return f"{row.layer} {row.shape.in_features} -> {widths}"


def _linear_cells(linear: LinearFigures, *, with_baseline: bool) -> list[str]:
    base = linear.base_us
    cells = [str(linear.row.tokens), str(linear.row.rank), number(base)]
    cells += _form_cells(linear.forms, LINEAR_FORMS, base)
    if with_baseline:
        times = linear.baseline
        cells.append(number(None if times is None else times.sequential_us - base))
        cells += [number(linear.baseline_added_us), number(linear.ratio, 2)]
    return [*cells, number(linear.plan_ratio, 3)]


def _form_cells(times: FormTimes, forms: tuple[str, ...], base: float = 0.0) -> list[str]:
    cells = [_form_cell(times, form, base) for form in forms]
    return [*cells, number(times.planned_us - base)]


def _form_cell(times: FormTimes, form: str, base: float) -> str:
    """Empty for a form that a batch of this size cannot take."""
    us = times.us.get(form)
    return number(None) if us is None else number(us - base) + "*" * (form == times.chosen)


def _gdns(figures: StreamFigures) -> Table:
    header = ["projection", "LoRA on", "M", *GDN_FORMS, "planned", "planned / fastest"]
    lines, last = [], ""
    for gdn in figures.gdns:
        name = _projection(gdn)
        row = gdn.row
        cells = [row.adapted.value, str(row.tokens), *_form_cells(gdn.forms, GDN_FORMS)]
        lines.append(["" if name == last else name, *cells, number(gdn.plan_ratio, 3)])
        last = name
    return header, lines


def _moes(figures: StreamFigures) -> Table:
    header = ["MoE layer", "M", *MOE_FORMS, "planned", "planned / one stream"]
    lines, last = [], ""
    for moe in figures.moes:
        name = "with a shared expert" if moe.row.shared else "routed experts alone"
        cells = [str(moe.row.tokens), *_form_cells(moe.forms, MOE_FORMS)]
        lines.append(["" if name == last else name, *cells, number(moe.plan_ratio, 3)])
        last = name
    return header, lines


def _projection(gdn: GDNFigures) -> str:
    shape = GDN_SHAPES[gdn.row.model]
    return f"{gdn.row.model} {shape.in_features} -> {sum(shape.qkvz)}, {sum(shape.ba)}"
