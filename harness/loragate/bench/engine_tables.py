"""Figures of `bench engine` as text: for the terminal, and from a record as Markdown. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from loragate.bench.engine_figures import EngineFigures, EngineRowFigures
from loragate.bench.engine_rows import Serving, Work
from loragate.bench.text import NONE, bar_line, columns, markdown, number

_OURS, _VLLMS = Serving.LORAKERNELS, Serving.VLLM
_OF_VLLM = ("of vLLM launched", "captured")
_UNITS = {Work.DECODE: "decode step", Work.PREFILL: "prefill token"}
_Table = tuple[Sequence[str], list[list[str]]]


def render_terminal(figures: EngineFigures) -> str:
    """Everything that was measured, as aligned columns."""
    lines = ["engines of vLLM: without adapters, with four of rank 16, and with the plug-in"]
    for header, cells in _tables(figures):
        lines += [*columns(header, cells), ""]
    return "\n".join([*lines, *map(bar_line, figures.bars())])


def render_markdown(figures: EngineFigures) -> str:
    lines: list[str] = []
    for header, cells in _tables(figures):
        lines += [*markdown(header, cells), ""]
    return "\n".join(lines[:-1])


def _tables(figures: EngineFigures) -> list[_Table]:
    """Those that have lines."""
    names = (figures.candidate, figures.baseline)
    added = [_added_cells(one) for one in figures.rows if one.row.work is not Work.SERVE]
    served = [_served_cells(one) for one in figures.rows if one.row.work is Work.SERVE]
    engines = [
        [
            one.model,
            one.serving.value,
            f"{one.start_s:.0f}",
            str(sum(one.counts.launched.values())),
            str(sum(one.counts.captured.values())),
            str(one.counts.vllms_launched),
            str(one.counts.vllms_captured),
        ]
        for one in figures.engines
    ]
    graphs = ("graph", *(f"+{name}" for name in names))
    found: list[_Table] = [
        (("us", "requests", "base", *(f"+{name}" for name in names), "ratio", *graphs), added),
        (("tokens a second", "requests", "base", *names, f"over {figures.baseline}"), served),
        (("engine", "serves", "start, s", "launched", "captured", *_OF_VLLM), engines),
    ]
    return [(header, cells) for header, cells in found if cells]


def _added_cells(one: EngineRowFigures) -> list[str]:
    # a decode step takes hundreds of times as long as a token of a prompt
    digits = 1 if one.row.work is Work.DECODE else 3
    added = [number(one.added_us(serving), digits) for serving in (_OURS, _VLLMS)]
    base = number(one.us[Serving.BASE], digits)
    unit = f"{one.row.model} {_UNITS[one.row.work]}"
    ratio = number(one.ratio, 2)
    return [unit, str(one.row.batch), base, *added, ratio, *_graph_cells(one)]


def _graph_cells(one: EngineRowFigures) -> list[str]:
    if not one.replay_us:
        return [NONE] * 3
    base = one.replay_us[Serving.BASE]
    added = [number(one.replay_us[serving] - base) for serving in (_OURS, _VLLMS)]
    return [number(base), *added]


def _served_cells(one: EngineRowFigures) -> list[str]:
    rates = [f"{1e6 / one.us[serving]:.0f}" for serving in (Serving.BASE, _OURS, _VLLMS)]
    faster = number(one.us[_VLLMS] / one.us[_OURS], 2)
    return [one.row.model, str(one.row.batch), *rates, faster]
