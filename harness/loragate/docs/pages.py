"""Which parts of which pages are generated, and whether they are current.

Invariant: everything is rendered from the records in ci/results, the list of findings and the case
files; nothing is measured. Plots are compared by the digest of their figures, so a check needs no
matplotlib.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loragate.bench.kinds import KINDS
from loragate.bench.plots import Plot, is_current, plots_of
from loragate.core.files import write_atomically
from loragate.docs import drills
from loragate.docs.blocks import content_of, replaced
from loragate.docs.results import (
    Section,
    bars_table,
    commits_sentence,
    gate_sentences,
    provenance_line,
    summary,
)
from loragate.faults.record import GPU_SECTION, SECTION, upgraded
from loragate.faults.tables import render_detection, render_markdown
from loragate.findings.load import load_ledger
from loragate.findings.page import render_page
from loragate.mutants import record as mutants
from loragate.mutants.rates import render_rates, render_rates_of_kinds
from loragate.records.results import read_section, require_section, sections_of, taken_from
from loragate.report.record import SEEDS
from loragate.scan import figures as scans

CPU_RECORD = Path("ci/results/cpu.json")
GPU_RECORD = Path("ci/results/nvidia-h200.json")
# of a GPU with less memory, which runs fewer workers; bars are those of the other one
SMALLER_GPU_RECORD = Path("ci/results/nvidia-h100.json")
PLOTS = Path("docs/img")
_STREAMS = KINDS["streams"]
_MUTANTS = (mutants.SECTION, mutants.GPU_SECTION, mutants.FIRST_SECTION)
# recorded for the first time when a GPU has run them
_LATER = ("streams", "graphs", "engine")
FINDINGS, FINDINGS_PAGE = Path("cases/findings/vllm.yaml"), Path("docs/findings.md")


@dataclass(frozen=True, slots=True)
class Records:
    """The recorded sections of a checkout."""

    root: Path

    def cpu(self, name: str) -> dict[str, Any]:
        """Raises ResultsError if it was never recorded."""
        return self._section(CPU_RECORD, name)

    def gpu(self, name: str) -> dict[str, Any]:
        """Raises ResultsError if it was never recorded."""
        return self._section(GPU_RECORD, name)

    def seeds(self) -> list[dict[str, Any]]:
        """Of the runs with several draws. Raises ResultsError."""
        return sections_of(self.root / GPU_RECORD, SEEDS)

    def cpu_if_any(self, name: str) -> dict[str, Any] | None:
        return read_section(self.root / CPU_RECORD, name)

    def gpu_if_any(self, name: str) -> dict[str, Any] | None:
        return read_section(self.root / GPU_RECORD, name)

    def smaller_gpu_if_any(self, name: str) -> dict[str, Any] | None:
        return read_section(self.root / SMALLER_GPU_RECORD, name)

    def plots(self) -> tuple[Plot, ...]:
        with taken_from(f"{PLOTS}: {GPU_RECORD}"):
            return plots_of(self.root / GPU_RECORD)

    def _section(self, record: Path, name: str) -> dict[str, Any]:
        return require_section(self.root / record, name)


@dataclass(frozen=True, slots=True)
class Block:
    page: str
    name: str
    render: Callable[[Records], str]

    def content(self, records: Records) -> str:
        """Raises ResultsError for a record that is missing, or lacks what the block shows."""
        with taken_from(f"{self.page}: block {self.name!r}: a record of ci/results"):
            return self.render(records)


def _later(records: Records) -> dict[str, Section | None]:
    return {name: records.gpu_if_any(KINDS[name].section) for name in _LATER}


def _summary(records: Records) -> str:
    dense, moe, gate = map(records.gpu, ("bench_dense", "bench_moe", "gate"))
    return summary(dense, moe, gate, records.seeds(), **_later(records))


def _detection(records: Records) -> str:
    return render_detection(
        upgraded(records.cpu(SECTION)), on_gpu=upgraded(records.gpu(GPU_SECTION))
    )


def _kill_rates(records: Records) -> str:
    section = upgraded(records.cpu(SECTION))
    return f"{render_markdown(section)}\n\n{provenance_line(section)}{commits_sentence(section)}"


def _table(kind_name: str) -> Callable[[Records], str]:
    kind = KINDS[kind_name]

    def render(records: Records) -> str:
        section = records.gpu(kind.section)
        return f"{provenance_line(section)}\n\n{kind.markdown(kind.read(section))}"

    return render


def _table_if_any(kind_name: str) -> Callable[[Records], str]:
    """Of a kind that is recorded for the first time when a GPU has run it."""
    kind, table = KINDS[kind_name], _table(kind_name)

    def render(records: Records) -> str:
        is_recorded = records.gpu_if_any(kind.section) is not None
        return table(records) if is_recorded else "Not recorded yet."

    return render


def _streams_plot(records: Records) -> str:
    if records.gpu_if_any(_STREAMS.section) is None:
        return "`bench streams`, which compares one stream with two, was not recorded yet."
    return (
        "![Added time over the number of tokens, on one stream and on two]"
        f"({PLOTS}/lora-tax-streams.svg)"
    )


def _bars(records: Records) -> str:
    dense, moe = records.gpu("bench_dense"), records.gpu("bench_moe")
    return bars_table(dense, moe, **_later(records))


def _gate(records: Records) -> str:
    return gate_sentences(records.gpu("gate"), records.seeds())


def _drills(records: Records) -> str:
    section = records.cpu(drills.SECTION)
    return f"{drills.drills_table(section)}\n\n{provenance_line(section)}"


def _mutants(records: Records) -> str:
    # samples are recorded when the kernels are done, edits by hand when somebody has written some
    first = records.cpu_if_any(mutants.FIRST_SECTION)
    return mutants.render_record(records.cpu_if_any(mutants.SECTION), first)


def _mutant_rates(records: Records) -> str:
    return render_rates(*map(records.cpu_if_any, _MUTANTS))


def _rates_of_kinds(records: Records) -> str:
    return render_rates_of_kinds(*map(records.cpu_if_any, _MUTANTS))


def _scans(records: Records) -> str:
    return scans.table(
        {
            "2 cores": records.cpu_if_any(scans.SECTION),
            "H200": records.gpu_if_any(scans.SECTION),
            "H100": records.smaller_gpu_if_any(scans.SECTION),
        }
    )


def _coverage(root: Path) -> str:
    # the plans import torch, which no other page needs
    from loragate.docs.coverage import coverage_tables

    return coverage_tables(root)


BLOCKS = (
    Block("README.md", "detection", _detection),
    Block("README.md", "mutant rates", _rates_of_kinds),
    Block("README.md", "streams plot", _streams_plot),
    Block("README.md", "results", _summary),
    Block("docs/benchmarks.md", "bars", _bars),
    Block("docs/benchmarks.md", "bench dense", _table("dense")),
    Block("docs/benchmarks.md", "bench moe", _table("moe")),
    Block("docs/benchmarks.md", "bench streams", _table_if_any("streams")),
    Block("docs/benchmarks.md", "bench graphs", _table_if_any("graphs")),
    Block("docs/benchmarks.md", "bench engine", _table_if_any("engine")),
    Block("docs/benchmarks.md", "gate", _gate),
    Block("docs/faults.md", "kill rates", _kill_rates),
    Block("docs/mutants.md", "rates", _mutant_rates),
    Block("docs/mutants.md", "mutants", _mutants),
    Block("docs/nightly.md", "scans", _scans),
    Block("docs/reliability.md", "drills", _drills),
    Block("docs/coverage.md", "branches", lambda records: _coverage(records.root)),
)


def stale_parts(root: Path) -> Iterator[str]:
    """What does not show what is recorded: blocks, pages and plots by name.

    Raises ResultsError for a record and BlockError for a page that cannot be used."""
    records = Records(root)
    for block in BLOCKS:
        text = (root / block.page).read_text(encoding="utf-8")
        if content_of(text, block.name, page=block.page) != block.content(records):
            yield f"{block.page}: block {block.name!r}"
    if (root / FINDINGS_PAGE).read_text(encoding="utf-8") != _findings_page(root):
        yield str(FINDINGS_PAGE)
    for plot in records.plots():
        if not is_current(plot, root / PLOTS):
            yield f"{PLOTS}/{plot.name}.svg"


def write_pages(root: Path) -> None:
    """Bring all blocks and docs/findings.md up to date. Raises ResultsError and BlockError."""
    records = Records(root)
    texts: dict[str, str] = {}
    for block in BLOCKS:
        text = texts.get(block.page) or (root / block.page).read_text(encoding="utf-8")
        content = block.content(records)
        texts[block.page] = replaced(text, block.name, content, page=block.page)
    texts[str(FINDINGS_PAGE)] = _findings_page(root)
    for page, text in texts.items():
        write_atomically(root / page, text)


def stale_plots(root: Path) -> list[Plot]:
    """Raises ResultsError."""
    return [plot for plot in Records(root).plots() if not is_current(plot, root / PLOTS)]


def _findings_page(root: Path) -> str:
    return render_page(load_ledger(root / FINDINGS))
