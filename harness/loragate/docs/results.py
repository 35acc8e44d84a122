"""Sentences and tables of the pages, from recorded sections. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from loragate.bench.bars import Bar, geometric_mean, worst_of
from loragate.bench.engine_figures import EngineFigures
from loragate.bench.engine_rows import LAYERS, Serving, Work
from loragate.bench.figures import PREFILL_TOKENS, DenseFigures
from loragate.bench.graphs_figures import GraphFigures
from loragate.bench.kinds import Figures
from loragate.bench.moe_figures import MAX_ADDED, MoEFigures
from loragate.bench.moe_rows import LAYER_RANK
from loragate.bench.streams_figures import StreamFigures
from loragate.bench.text import markdown, measured, number
from loragate.core.checkout import Tree
from loragate.core.verdict import Verdict

Section = Mapping[str, Any]
_PACKAGES = ("torch", "triton", "vllm")
# the site whose counts are compiled kernels, not cases
_COMPILE = "compile"


def summary(
    dense: Section,
    moe: Section,
    gate: Section,
    seeds: Sequence[Section],
    *,
    streams: Section | None = None,
    graphs: Section | None = None,
    engine: Section | None = None,
) -> str:
    """The results as a list, and how many bars are met. `streams`, `graphs` and `engine` are None
    where they were never recorded."""
    dense_run, moe_run = DenseFigures.from_payload(dense), MoEFigures.from_payload(moe)
    lines, bars = [*_dense_lines(dense_run, dense), *_moe_lines(moe_run)], [*bars_of(dense_run)]
    bars += bars_of(moe_run)
    if streams is not None:
        streams_run = StreamFigures.from_payload(streams)
        lines.append(_streams_line(streams_run))
        bars += bars_of(streams_run)
    if graphs is not None:
        graphs_run = GraphFigures.from_payload(graphs)
        lines.append(_graphs_line(graphs_run))
        bars += bars_of(graphs_run)
    if engine is not None:
        engine_run = EngineFigures.from_payload(engine)
        lines.append(_engine_line(engine_run, engine))
        bars += bars_of(engine_run)
    items = "\n".join(f"* {line}" for line in [*lines, gate_sentences(gate, seeds)])
    return f"{items}\n\n{_bars_sentence(bars)}"


def _dense_lines(run: DenseFigures, section: Section) -> tuple[str, str]:
    ratios = run.ratios()
    version = section["versions"].get(run.baseline, "")
    prefill = [row for row in run.rows if row.row.tokens == PREFILL_TOKENS]
    shares = [
        f"{subject} {_range(row.added_us(subject) / row.base_us for row in prefill)}"
        for subject in run.subjects
    ]
    return (
        f"Dense layers: {run.candidate} adds **{number(geometric_mean(ratios), 2)}** of the time "
        f"that {run.baseline} {version} adds (geometric mean of {len(ratios)} rows; worst row "
        f"{number(worst_of(ratios), 2)}).",
        f"At {PREFILL_TOKENS} tokens LoRA adds to the base GEMM: {', '.join(shares)}.",
    )


def _moe_lines(run: MoEFigures) -> tuple[str, str]:
    ratios = run.ratios()
    added = [
        f"{layer.added:.0%} at {layer.row.tokens} tokens"
        for layer in run.layers
        if layer.row.tokens in MAX_ADDED
    ]
    return (
        f"MoE deltas: {run.candidate} takes **{number(geometric_mean(ratios), 2)}** of the time of "
        f"the fastest {run.baseline} path (geometric mean of {len(ratios)} rows; worst row "
        f"{number(worst_of(ratios), 2)}).",
        f"A whole MoE layer of Qwen3-30B-A3B, rank {LAYER_RANK} on every expert: LoRA adds "
        f"{' and '.join(added)}.",
    )


def _streams_line(run: StreamFigures) -> str:
    line = (
        f"With a second stream where the plan takes one, {run.candidate} adds "
        f"**{number(run.mean_ratio, 2)}** of the time that {run.baseline} adds with its own "
        f"(geometric mean of {len(run.linears)} rows)"
    )
    best = run.best_dual()
    if best is None:
        return f"{line}."
    return (
        f"{line}; at best, two streams add {number(best.dual_ratio, 2)} of what one stream adds "
        f"({best.row.id})."
    )


def _graphs_line(run: GraphFigures) -> str:
    worst = worst_of(one.ratio for one in run.replays)
    return (
        f"A decode step that is replayed from a CUDA graph takes at most **{number(worst, 2)}** of "
        f"the sum of its kernels' times, and {_range_us(one.work_us for one in run.hosts)} us of "
        f"the host beside its launch."
    )


def _range_us(values: Iterable[float]) -> str:
    found = sorted(values)
    return f"{found[0]:.0f} to {found[-1]:.0f}"


def _engine_line(run: EngineFigures, section: Section) -> str:
    version = section["versions"].get(run.baseline, "")
    added = [one.ratio for one in run.rows if one.row.work is not Work.SERVE]
    faster = [
        f"{one.us[Serving.VLLM] / one.us[Serving.LORAKERNELS]:.2f} ({one.row.model}, "
        f"{LAYERS[one.row.model]} layers)"
        for one in run.rows
        if one.row.work is Work.SERVE
    ]
    return (
        f"In a whole engine of {run.baseline} {version}, the plug-in adds "
        f"**{number(geometric_mean(added), 2)}** of the time that its own kernels add to decode "
        f"steps and tokens of prompts (geometric mean of {len(added)} rows; worst row "
        f"{number(worst_of(added), 2)}); it serves mixed requests at {' and '.join(faster)} times "
        f"the speed."
    )


def gate_sentences(gate: Section, seeds: Sequence[Section]) -> str:
    """How long the recorded gates took, and what failed in them."""
    counts = gate["counts"]
    cases = [count for count in counts if count["site"] != _COMPILE]
    kernels = [count for count in counts if count["site"] == _COMPILE]
    plain = (
        f"The {gate['tier']} gate of {' and '.join(gate['subjects'])} took "
        f"{_duration(gate['duration_s'])} on {_devices(gate)}: "
        f"{_total(cases, 'executed')} cases and {_total(kernels, 'executed')} kernels of "
        f"{_total(counts, 'expected')} expected; {_failures(counts)}."
    )
    return " ".join([plain, *map(_seeds_sentence, seeds)])


def _seeds_sentence(seeds: Section) -> str:
    drawn = [count for seed in seeds["seeds"] for count in seed["counts"].values()]
    files = ", ".join(seeds.get("matrix", ()))
    of = f" of the {seeds['tier']} cases in {files}" if files else ""
    several = f", {seeds['gpus']} GPUs" if seeds.get("gpus", 0) > 1 else ""
    shared = ", MPS" if seeds.get("mps") else ""
    return (
        f"{' and '.join(seeds['subjects'])} with {len(seeds['seeds'])} seeds{of} "
        f"({_length(seeds)}{several}{shared}): {_total(drawn, 'executed')} trials; "
        f"{_failures(drawn)}."
    )


def _devices(gate: Section) -> str:
    name = str(gate["machine"]["name"])
    # records that were written before do not say how many
    count = gate.get("gpus", 0)
    return f"{count} x {name}" if count > 1 else f"one {name}" if count == 1 else name


def _length(gate: Section) -> str:
    took = _duration(gate["duration_s"])
    # of the longest one
    return f"{gate['shards']} shards of up to {took}" if "shards" in gate else took


def _failures(counts: Sequence[Mapping[str, Any]]) -> str:
    known = _total(counts, "known")
    other = _total(counts, "executed") - _total(counts, "passed") - known
    listed = f"{known} fail as docs/findings.md lists, " if known else ""
    return f"{listed}{other or 'no'}{' other' if known else ''} failures"


def bars_table(
    dense: Section,
    moe: Section,
    *,
    streams: Section | None = None,
    graphs: Section | None = None,
    engine: Section | None = None,
) -> str:
    """Every bar with its target and what was measured. What may be None is as in `summary`."""
    bars = {
        "dense": bars_of(DenseFigures.from_payload(dense)),
        "moe": bars_of(MoEFigures.from_payload(moe)),
    }
    if streams is not None:
        bars["streams"] = bars_of(StreamFigures.from_payload(streams))
    if graphs is not None:
        bars["graphs"] = bars_of(GraphFigures.from_payload(graphs))
    if engine is not None:
        bars["engine"] = bars_of(EngineFigures.from_payload(engine))
    rows = [_bar_cells(name, bar) for name in bars for bar in bars[name]]
    return "\n".join(markdown(["bar", "at most", "measured", ""], rows))


def bars_of(figures: Figures) -> tuple[Bar, ...]:
    """Those of a record. What lacks rows that the table has by now may have missed any of them."""
    if figures.complete:
        return figures.bars()
    return tuple(
        bar if bar.verdict is Verdict.FAIL else replace(bar, measured=None)
        for bar in figures.bars()
    )


def _bar_cells(bench: str, bar: Bar) -> list[str]:
    outcome = _OUTCOMES[bar.verdict]
    return [f"`bench {bench}`: {bar.name}", _target(bar), measured(bar), outcome]


_OUTCOMES: Mapping[Verdict, str] = {
    Verdict.PASS: "met",
    Verdict.FAIL: "missed",
    Verdict.INCONCLUSIVE: "not measured yet",
}


def _target(bar: Bar) -> str:
    return f"{bar.target}, {bar.note}" if bar.note else str(bar.target)


def _bars_sentence(bars: Sequence[Bar]) -> str:
    met = sum(bar.verdict is Verdict.PASS for bar in bars)
    missed = [
        f"{bar.name}, {measured(bar)} instead of at most {bar.target}"
        for bar in bars
        if bar.verdict is Verdict.FAIL
    ]
    # of a record that is older than the bar, or without a comparison
    later = [bar.name for bar in bars if bar.verdict is Verdict.INCONCLUSIVE]
    rest = f"; missed: {'; '.join(missed)}" if missed else ""
    rest += f"; not measured yet: {'; '.join(later)}" if later else ""
    return f"{met} of {len(bars)} performance targets are met{rest}."


def provenance_line(section: Section) -> str:
    """Where and at which commit a section was recorded."""
    found = section["versions"]
    versions = ", ".join(f"{name} {found[name]}" for name in _PACKAGES if found.get(name))
    # a record of a tree that was changed is of no commit
    changed = " and changes to it" if section.get("tree") == Tree.DIRTY else ""
    return (
        f"Recorded {section['recorded_at'][:10]} at commit {section['commit'][:7]}{changed}, "
        f"{section['machine']['name']}, {versions}."
    )


def commits_sentence(section: Section) -> str:
    """Of a section whose entries are recorded one by one: how many are of which commit, with a
    space in front; "" where all are of the one that the section names."""
    commits = Counter(entry["commit"] for entry in section["faults"].values())
    if set(commits) <= {section["commit"]}:
        return ""
    counts = ", ".join(f"{count} of {commit[:7]}" for commit, count in commits.most_common())
    return f" Its entries are {counts}."


def _range(shares: Iterable[float]) -> str:
    found = sorted(shares)
    return f"{100 * found[0]:.0f} to {found[-1]:.0%}"


def _total(counts: Iterable[Mapping[str, Any]], key: str) -> int:
    return sum(count.get(key, 0) for count in counts)


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02} s"
