"""Figures of `bench moe` as text: for the terminal and, from a record, as Markdown
tables. Pure."""

from __future__ import annotations

from loragate.bench.bars import geometric_mean, worst_of
from loragate.bench.moe_figures import DeltaFigures, MoEFigures, State
from loragate.bench.moe_rows import FEW_EXPERTS, LAYER_RANK, MANY_EXPERTS, SLOTS, projection_of
from loragate.bench.text import bar_line, columns, markdown, number
from loragate.matrix.case import Path

# in the order of the columns
_PATHS = (Path.TWO_KERNEL, Path.ONE_SHOT, Path.SMALL_BATCH)
Table = tuple[list[str], list[list[str]]]


def render_terminal(figures: MoEFigures) -> str:
    """Everything that was measured, as aligned columns."""
    copied = figures.copy_bytes_per_s / 1e12
    return "\n".join(
        [
            "moe_delta, us a call: median of CUDA-graph replays, pairs aligned before; the last "
            "columns with alignment",
            *columns(*_deltas(figures)),
            f"floor at 4.3 TB/s and 780 TFLOP/s; this machine copies {copied:.2f} TB/s (read + "
            "written)",
            "",
            f"sorting the pairs of a step, us (128 experts, top-8, {SLOTS} slots)",
            *columns(*_aligns(figures)),
            "",
            f"the same with few and with many experts, us (top-10, {SLOTS} slots)",
            *columns(*_experts(figures)),
            "",
            f"a layer of Qwen3-30B-A3B, us, alignment included; +LoRA: rank {LAYER_RANK} on every "
            f"expert, {SLOTS} slots",
            *columns(*_layers(figures)),
            "",
            *map(bar_line, figures.bars()),
            f"deltas {_with_alignment(figures)}",
        ]
    )


def render_markdown(figures: MoEFigures) -> str:
    """One table each for deltas, alignment, alignment by the number of experts, and layers; those
    that have rows."""
    tables = (_deltas(figures), _aligns(figures), _experts(figures), _layers(figures))
    lines = [line for table in tables if table[1] for line in [*markdown(*table), ""]]
    return "\n".join([*lines, f"Deltas {_with_alignment(figures)}."])


def _with_alignment(figures: MoEFigures) -> str:
    texts = []
    for state, where in ((State.ALIGNED, ""), (State.COLD, "so with a cold L2 cache, ")):
        if ratios := figures.ratios(state):
            mean, worst = number(geometric_mean(ratios), 2), number(worst_of(ratios), 2)
            texts.append(f"{where}geometric mean {mean}, worst row {worst}")
    return f"with alignment on both sides, {'; '.join(texts)}"


def _has_cold(figures: MoEFigures) -> bool:
    return any(delta.has_cold for delta in figures.deltas)


def _deltas(figures: MoEFigures) -> Table:
    ours, theirs = figures.candidate, figures.baseline
    others = [f"{theirs} {_column(path)}" for path in _PATHS] if theirs else []
    header = ["projection", "rank", "M", "floor", ours, *map(_column, _PATHS), *others]
    of_both = [ours, *([theirs, "ratio"] if theirs else [])]
    header += ["ratio", "over floor", f"aligned: {of_both[0]}", *of_both[1:]]
    if _has_cold(figures):
        header += [f"cold: {of_both[0]}", *of_both[1:]]
    lines, last = [], ""
    for delta in figures.deltas:
        name = delta.row.projection
        lines.append(["" if name == last else _projection(name), *_delta_cells(figures, delta)])
        last = name
    return header, lines


def _delta_cells(figures: MoEFigures, delta: DeltaFigures) -> list[str]:
    ours, theirs = figures.candidate, figures.baseline
    cells = [str(delta.row.rank), str(delta.row.tokens), number(delta.floor_us)]
    cells += [number(delta.ours_us(ours))]
    # the plan's choice is marked
    of_paths = delta.subjects[ours].launch_us
    cells += [number(of_paths.get(path)) + "*" * (path is delta.chosen) for path in _PATHS]
    if theirs:
        of_paths = delta.subjects[theirs].launch_us
        cells += [number(of_paths.get(path)) for path in _PATHS]
    cells += [number(delta.ratio(ours, theirs), 2), number(delta.over_floor(ours))]
    for state in (State.ALIGNED, *([State.COLD] if _has_cold(figures) else [])):
        cells += _state_cells(figures, delta, state)
    return cells


def _state_cells(figures: MoEFigures, delta: DeltaFigures, state: State) -> list[str]:
    ours, theirs = figures.candidate, figures.baseline
    if state is State.COLD and not delta.has_cold:
        return [""] * (3 if theirs else 1)
    cells = [number(delta.ours_us(ours, state))]
    if theirs:
        cells += [number(delta.best_us(theirs, state)), number(delta.ratio(ours, theirs, state), 2)]
    return cells


def _aligns(figures: MoEFigures) -> Table:
    ours, theirs = figures.candidate, figures.baseline
    header = ["align, M", ours, *([theirs] if theirs else []), "ratio"]
    lines = [
        [
            str(align.row.tokens),
            *(number(align.us.get(name)) for name in (ours, theirs) if name),
            number(align.ratio(ours, theirs), 2),
        ]
        for align in figures.aligns
    ]
    return header, lines


def _experts(figures: MoEFigures) -> Table:
    names = [figures.candidate, *([figures.baseline] if figures.baseline else [])]
    header = ["align, M"]
    for name in names:
        header += [f"{name}, {FEW_EXPERTS} experts", f"{MANY_EXPERTS} experts", "ratio"]
    lines = []
    for align in figures.experts:
        cells = [str(align.row.tokens)]
        for name in names:
            cells += [number(align.few_us[name]), number(align.many_us[name])]
            cells.append(number(align.ratio(name), 2))
        lines.append(cells)
    return header, lines


def _layers(figures: MoEFigures) -> Table:
    ours, theirs = figures.candidate, figures.baseline
    header = ["layer, M", *([f"{theirs} base"] if theirs else []), f"{ours} base", "+LoRA", "adds"]
    lines = [
        [
            str(layer.row.tokens),
            *([number(layer.baseline_us)] if theirs else []),
            number(layer.base_us),
            number(layer.lora_us),
            f"{layer.added:.0%}",
        ]
        for layer in figures.layers
    ]
    return header, lines


def _projection(name: str) -> str:
    shape = projection_of(name)
    widths = "+".join(map(str, shape.slices))
    return f"{name} {shape.in_features} -> {widths}, {shape.top_k} of {shape.experts} experts"


def _column(path: Path) -> str:
    return path.replace("_", " ")
