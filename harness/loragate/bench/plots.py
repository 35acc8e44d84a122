"""Small plots from a record: what LoRA costs over the number of tokens.

Invariant: what a plot shows is decided here from the record, without matplotlib; the SVG carries a
digest of it, so that a stale plot is found without drawing it again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from loragate.bench.figures import DenseFigures
from loragate.bench.kinds import KINDS
from loragate.bench.moe_figures import MoEFigures
from loragate.bench.moe_rows import PROJECTIONS
from loragate.bench.moe_rows import RANKS as MOE_RANKS
from loragate.bench.rows import LINEARS
from loragate.bench.rows import RANKS as DENSE_RANKS
from loragate.bench.streams_figures import StreamFigures
from loragate.bench.streams_measured import LinearFigures
from loragate.core.files import write_atomically
from loragate.records.results import read_section, require_section

_DIGEST = "loragate-figures:"
# the last line of a file that is whole
_END = "</svg>\n"
_TITLES = {
    "qwen3moe": "64 experts, w13",
    "qwen3_30b_w13": "Qwen3-30B-A3B, w13",
    "qwen3_30b_w2": "Qwen3-30B-A3B, w2",
    "mixtral": "Mixtral-8x7B, w13",
}


@dataclass(frozen=True, slots=True)
class Series:
    """One line: (tokens, value) of one subject at one rank."""

    subject: str
    rank: int
    points: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class Panel:
    title: str
    series: tuple[Series, ...]


@dataclass(frozen=True, slots=True)
class Plot:
    """Panels side by side that share a logarithmic y axis. `name` is the stem of the file."""

    name: str
    title: str
    y_label: str
    panels: tuple[Panel, ...]

    @property
    def digest(self) -> str:
        """Changes with everything that is shown."""
        text = json.dumps(asdict(self), sort_keys=True)
        return _DIGEST + hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def dense_plot(run: DenseFigures) -> Plot:
    """Added time relative to the base GEMM; a row whose difference drowns in noise is left out."""

    def series(linear: str, subject: str, rank: int) -> Series:
        rows = [f for f in run.rows if f.row.linear == linear and f.row.rank == rank]
        shares = ((f.row.tokens, 100 * f.added_us(subject) / f.base_us) for f in rows)
        return Series(subject, rank, _points(shares))

    return Plot(
        name="lora-tax-dense",
        title="Time that LoRA adds to a bf16 layer of Qwen3-8B",
        y_label="added time, % of the base",
        panels=tuple(
            Panel(linear, tuple(series(linear, s, r) for s in run.subjects for r in DENSE_RANKS))
            for linear in LINEARS
        ),
    )


def moe_plot(run: MoEFigures) -> Plot:
    """Time of a delta on aligned pairs: the candidate's plan and the baseline's best path."""

    def series(projection: str, subject: str, rank: int) -> Series:
        rows = [d for d in run.deltas if (d.row.projection, d.row.rank) == (projection, rank)]
        own = subject == run.candidate
        times = ((d.row.tokens, d.ours_us(subject) if own else d.best_us(subject)) for d in rows)
        return Series(subject, rank, _points(times))

    subjects = (run.candidate, run.baseline) if run.baseline else (run.candidate,)
    return Plot(
        name="lora-tax-moe",
        title="Time of an MoE LoRA delta",
        y_label="microseconds",
        panels=tuple(
            Panel(_TITLES[name], tuple(series(name, s, r) for s in subjects for r in MOE_RANKS))
            for name in PROJECTIONS
        ),
    )


def streams_plot(run: StreamFigures) -> Plot:
    """Added time of the rows of the table: on one stream, as planned with the switch on, and with
    the second stream of the baseline."""
    times: dict[str, Callable[[LinearFigures], float | None]] = {
        "one stream": lambda figures: figures.added_us("single"),
        "planned": lambda figures: figures.planned_added_us,
    }
    if run.baseline:
        times[f"{run.baseline} dual"] = lambda figures: figures.baseline_added_us

    def series(layer: str, name: str, rank: int) -> Series:
        rows = [f for f in run.listed if (f.row.layer, f.row.rank) == (layer, rank)]
        return Series(name, rank, _points((f.row.tokens, times[name](f)) for f in rows))

    return Plot(
        name="lora-tax-streams",
        title="Time that LoRA adds to a bf16 layer of Qwen3-8B, on one stream and on two",
        y_label="microseconds",
        panels=tuple(
            Panel(layer, tuple(series(layer, name, r) for name in times for r in DENSE_RANKS))
            for layer in LINEARS
        ),
    )


def _points(values: Iterable[tuple[int, float | None]]) -> tuple[tuple[int, float], ...]:
    # four digits are more than a plot shows
    return tuple((m, float(f"{value:.4g}")) for m, value in values if value and value > 0)


def plots_of(record: Path) -> tuple[Plot, ...]:
    """The plots of a results file, that of streams once it is recorded. Raises ResultsError for
    another section that is missing."""
    dense, moe = (_section(record, kind) for kind in ("dense", "moe"))
    plots = dense_plot(KINDS["dense"].read(dense)), moe_plot(KINDS["moe"].read(moe))
    streams = read_section(record, KINDS["streams"].section)
    return plots if streams is None else (*plots, streams_plot(KINDS["streams"].read(streams)))


def is_current(plot: Plot, folder: Path) -> bool:
    """Whether the file in `folder` shows these figures, and is not cut."""
    path = file_of(plot, folder)
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    return plot.digest in text and text.endswith(_END)


def file_of(plot: Plot, folder: Path) -> Path:
    return folder / f"{plot.name}.svg"


def write_plots(plots: Iterable[Plot], folder: Path) -> list[Path]:
    """Draw each plot into `folder`. Raises MissingMatplotlib."""
    from loragate.bench.drawing import draw

    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for plot in plots:
        path = file_of(plot, folder)
        write_atomically(path, draw(plot))
        written.append(path)
    return written


def _section(record: Path, kind: str) -> dict[str, object]:
    return require_section(record, KINDS[kind].section)
