"""Draws a plot as SVG. The same plot and version of matplotlib give the same bytes."""

from __future__ import annotations

import io
from typing import Any

from loragate.bench.plots import Panel, Plot

_COLOURS = ("#1b7f6b", "#c46a1b", "#5b5b8c")
_STYLES = ("-", "--", ":")
_PANEL_WIDTH, _HEIGHT = 2.5, 2.7
# labels of a legend that fit beside each other; more of them take several lines of three
_LABELS_OF_A_LINE, _LABELS_OF_LINES = 4, 3
_RC: Any = {
    "svg.hashsalt": "loragate",
    # text stays text: small files that a browser renders in its own font
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
}


class MissingMatplotlib(RuntimeError):
    """matplotlib is not installed."""


def draw(plot: Plot) -> str:
    """The text of an SVG file whose metadata holds the digest of the plot."""
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingMatplotlib(
            "plots need matplotlib; install the extra loragate[test]"
        ) from error
    with matplotlib.rc_context(_RC):
        size = (_PANEL_WIDTH * len(plot.panels) + 0.4, _HEIGHT)
        figure = Figure(figsize=size, facecolor="white", layout="constrained")
        axes = figure.subplots(1, len(plot.panels), sharey=True, squeeze=False)[0]
        for axis, panel in zip(axes, plot.panels, strict=True):
            _draw_panel(axis, panel)
        axes[0].set_ylabel(plot.y_label)
        figure.suptitle(plot.title, fontsize=10)
        handles, labels = axes[0].get_legend_handles_labels()
        count = len(labels)
        ncols = count if count <= _LABELS_OF_A_LINE else _LABELS_OF_LINES
        figure.legend(handles, labels, loc="outside lower center", ncols=ncols, frameon=False)
        buffer = io.StringIO()
        metadata = {"Date": None, "Creator": None, "Identifier": plot.digest}
        figure.savefig(buffer, format="svg", metadata=metadata)
    return "\n".join(line.rstrip() for line in buffer.getvalue().splitlines()) + "\n"


def _draw_panel(axis: Any, panel: Panel) -> None:
    from matplotlib.ticker import LogLocator, StrMethodFormatter

    subjects = list(dict.fromkeys(series.subject for series in panel.series))
    ranks = sorted({series.rank for series in panel.series})
    for series in panel.series:
        axis.plot(
            [tokens for tokens, _ in series.points],
            [value for _, value in series.points],
            color=_COLOURS[subjects.index(series.subject)],
            linestyle=_STYLES[ranks.index(series.rank)],
            marker="o",
            markersize=3,
            linewidth=1.3,
            label=f"{series.subject}, rank {series.rank}",
        )
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.yaxis.set_major_locator(LogLocator(subs=(1, 3)))
    axis.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axis.set_title(panel.title)
    axis.set_xlabel("tokens")
    ticks = sorted({tokens for series in panel.series for tokens, _ in series.points})
    axis.set_xticks(ticks, labels=[str(tick) for tick in ticks])
    axis.tick_params(axis="x", labelsize=7.5)
    axis.minorticks_off()
    axis.grid(axis="y", color="#dddddd", linewidth=0.6)
