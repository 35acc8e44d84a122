"""Figures of `bench graphs` as text: for the terminal, and from a record as Markdown. Pure."""

from __future__ import annotations

from loragate.bench.graphs_figures import GraphFigures
from loragate.bench.text import bar_line, columns, markdown

_REPLAY = ("replay, us", "M", "adapters", "replay", "kernels", "ratio")
_HOST = ("host, us", "slots", "step", "launch", "beside it", "quietest round")
_MEMORY = ("memory, KiB", "reserved", "in use")


def render_terminal(figures: GraphFigures) -> str:
    """Everything that was measured, as aligned columns."""
    lines = ["four decoder layers: replays of captured decode steps"]
    for header, cells in _tables(figures):
        lines += [*columns(header, cells), ""]
    return "\n".join([*lines, *map(bar_line, figures.bars())])


def render_markdown(figures: GraphFigures) -> str:
    lines: list[str] = []
    for header, cells in _tables(figures):
        lines += [*markdown(header, cells), ""]
    return "\n".join(lines[:-1])


def _tables(figures: GraphFigures) -> list[tuple[tuple[str, ...], list[list[str]]]]:
    """Those that have lines."""
    replays = [
        [
            one.row.model,
            str(one.row.tokens),
            str(one.row.adapters),
            f"{one.replay_us:.1f}",
            f"{one.kernels_us:.1f}",
            f"{one.ratio:.3f}",
        ]
        for one in figures.replays
    ]
    hosts = [
        [
            one.row.model,
            str(one.row.slots),
            f"{one.host_us:.1f}",
            f"{one.launch_us:.1f}" if one.launch_us else "-",
            f"{one.work_us:.1f}",
            f"{one.quietest_us:.1f}" if one.quietest_us else "-",
        ]
        for one in figures.hosts
    ]
    memories = [
        [one.row.model, f"{one.reserved / 1024:.1f}", f"{one.used / 1024:.1f}"]
        for one in figures.memories
    ]
    found = ((_REPLAY, replays), (_HOST, hosts), (_MEMORY, memories))
    return [(header, cells) for header, cells in found if cells]
