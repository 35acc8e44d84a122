from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from loragate.bench.drawing import MissingMatplotlib, draw
from loragate.bench.figures import DenseFigures
from loragate.bench.moe_figures import MoEFigures as ExpertFigures
from loragate.bench.plots import Panel, Plot, Series, is_current, plots_of, write_plots
from loragate.bench.streams_figures import StreamFigures
from loragate.bench.streams_measured import (
    BaselineTimes,
    FormTimes,
    GDNFigures,
    LinearFigures,
    MoEFigures,
    StreamMeasured,
)
from loragate.bench.streams_rows import GDNRow, LinearRow, StreamRow, stream_rows
from loragate.cli import main
from loragate.commands import docs
from loragate.core.checkout import project_root
from loragate.core.verdict import ExitCode, Verdict
from loragate.docs.blocks import BlockError, content_of, replaced
from loragate.docs.pages import BLOCKS, FINDINGS, GPU_RECORD, stale_parts
from loragate.docs.results import gate_sentences, provenance_line
from loragate.records.results import read_section, update_section

ORIGIN = ("commit", "machine", "recorded_at", "versions")
SOURCES = ("README.md", "docs", "ci/results", "cases")
LINK = re.compile(r"\]\(([^)#]+)\)")


@pytest.fixture
def copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The pages and records of this checkout in a folder of their own."""
    for source in SOURCES:
        path = project_root() / source
        if path.is_dir():
            shutil.copytree(path, tmp_path / source)
        else:
            shutil.copy(path, tmp_path / source)
    monkeypatch.setattr(docs, "project_root", lambda: tmp_path)
    return tmp_path


def test_the_docs_of_this_checkout_show_what_is_recorded() -> None:
    assert list(stale_parts(project_root())) == [], "run `loragate docs`"


PAGES = [project_root() / "README.md", project_root() / "CONTRIBUTING.md"]
PAGES += sorted((project_root() / "docs").glob("*.md"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_to_a_file(page: Path) -> None:
    links = LINK.findall(page.read_text(encoding="utf-8"))
    files = [page.parent / link for link in links if not link.startswith("http")]
    assert [file for file in files if not file.exists()] == []


def test_a_changed_block_is_named_and_written_again(
    copied: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = copied / "README.md"
    sound = page.read_text()
    page.write_text(sound.replace("targets are met", "targets are hit"))
    assert main(["docs", "--check"]) == ExitCode.WRONG
    assert capsys.readouterr().err == "loragate docs: stale: README.md: block 'results'\n"
    assert main(["docs"]) == ExitCode.OK
    assert page.read_text() == sound
    assert main(["docs", "--check"]) == ExitCode.OK


def test_a_new_record_makes_its_table_its_bars_and_its_plot_stale(
    copied: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = copied / GPU_RECORD
    document = json.loads(record.read_text())
    for row in document["sections"]["bench_dense"]["rows"]:
        row["with_lora_us"]["lorakernels"] *= 2
    record.write_text(json.dumps(document))
    assert main(["docs", "--check"]) == ExitCode.WRONG
    stale = capsys.readouterr().err
    for part in ("'results'", "'bars'", "'bench dense'", "lora-tax-dense.svg"):
        assert part in stale
    assert "lora-tax-moe.svg" not in stale
    assert main(["docs"]) == ExitCode.OK
    assert main(["docs", "--check"]) == ExitCode.OK


def stream_figures() -> StreamFigures:
    """A run of `bench streams` in which two streams always gain."""
    linear = FormTimes({"single": 13.0, "ahead": 14.0, "dual": 12.0}, "dual", 12.0)
    gdn = FormTimes({"serial": 4.0, "dual": 2.0, "merged": 3.0, "beside": 3.0}, "dual", 2.0)
    moe = FormTimes({"single": 9.0, "beside": 8.0, "dual": 9.5}, "beside", 8.0)

    def measured(row: StreamRow) -> StreamMeasured:
        if isinstance(row, LinearRow):
            return LinearFigures(row, 10.0, linear, BaselineTimes(25.0, 20.0), {})
        return GDNFigures(row, gdn, {}) if isinstance(row, GDNRow) else MoEFigures(row, moe, {})

    return StreamFigures("lorakernels", "vllm", tuple(map(measured, stream_rows())))


def test_streams_appear_in_the_pages_as_soon_as_they_are_recorded(copied: Path) -> None:
    record, plot = copied / GPU_RECORD, copied / "docs/img/lora-tax-streams.svg"
    document = json.loads(record.read_text())
    for section in ("bench_streams", "bench_graphs", "bench_engine"):
        document["sections"].pop(section, None)
    record.write_text(json.dumps(document))
    assert main(["docs"]) == ExitCode.OK
    pages = [copied / "README.md", copied / "docs/benchmarks.md"]
    assert all("ecorded yet" in page.read_text() for page in pages)
    assert "`bench streams`: " not in pages[1].read_text()
    plot.unlink(missing_ok=True)

    origin = {key: document["sections"]["bench_dense"][key] for key in ORIGIN}
    update_section(record, "bench_streams", stream_figures().payload() | origin)
    assert main(["docs", "--check"]) == ExitCode.WRONG
    assert main(["docs"]) == ExitCode.OK
    assert main(["docs", "--check"]) == ExitCode.OK
    readme, benchmarks = (page.read_text() for page in pages)
    assert "(docs/img/lora-tax-streams.svg)" in readme
    assert "vllm dual, rank 64" in plot.read_text()
    assert "lorakernels adds **0.20** of the time that vllm adds with its own" in readme
    assert "two streams add 0.67 of what one stream adds (qkv.m1.r16)" in readme
    # whatever was recorded of dense layers and of MoE, all targets of these streams are met
    sections = document["sections"]
    dense = DenseFigures.from_payload(sections["bench_dense"]).bars()
    recorded = [*dense, *ExpertFigures.from_payload(sections["bench_moe"]).bars()]
    missed = sum(bar.verdict is not Verdict.PASS for bar in recorded)
    targets = len(stream_figures().bars()) + len(recorded)
    assert f"{targets - missed} of {targets} performance targets are met" in readme
    assert "| qkv 4096 -> 4096+1024+1024 | 1 | 16 | 10.0 | 3.0 | 4.0 | 2.0* |" in benchmarks
    assert "| `bench streams`: input projection of a gated delta net" in benchmarks
    assert "| routed experts alone | 1 | 9.0 | 8.0* | 9.5 | 8.0 | 0.889 |" in benchmarks


def test_bars_of_graphs_that_are_missed_in_the_record_are_missed_on_the_pages(copied: Path) -> None:
    record = copied / GPU_RECORD
    section = json.loads(record.read_text())["sections"]["bench_graphs"]
    for host in section["hosts"]:
        host |= {"host_us": 99.0, "launch_us": 20.0}
    update_section(record, "bench_graphs", section)
    assert main(["docs"]) == ExitCode.OK
    readme, bars = ((copied / page).read_text() for page in ("README.md", "docs/benchmarks.md"))
    assert "and 79 to 79 us of the host beside its launch" in readme
    assert "host work between two replays, us, worst, 79.000 instead of at most 60.0" in readme
    assert "us, worst | 60.0 | 79.000 | missed |" in bars


def test_a_bar_that_is_younger_than_the_record_is_not_measured_yet_on_the_pages(
    copied: Path,
) -> None:
    record, name = copied / GPU_RECORD, "align with 512 experts over that with 64 at 4 to 64 tokens"
    section = json.loads(record.read_text())["sections"]["bench_moe"]
    section.pop("experts", None)
    update_section(record, "bench_moe", section)
    assert main(["docs"]) == ExitCode.OK
    readme, bars = ((copied / page).read_text() for page in ("README.md", "docs/benchmarks.md"))
    # nor is any other one of that table, which the record does not have as a whole
    (later,) = re.findall(r"; not measured yet: (.*)\.\n", readme)
    of_moe = [line for line in bars.splitlines() if line.startswith("| `bench moe`: ")]
    assert f"{name}, worst" in later.split("; ")
    assert len(later.split("; ")) == len(of_moe)
    assert all(line.endswith("| - | not measured yet |") for line in of_moe)
    assert main(["docs", "--check"]) == ExitCode.OK


@pytest.mark.parametrize("key", ["attempts", "draws"])
def test_the_number_of_seeds_is_read_from_records_of_every_version(key: str) -> None:
    """Records that were written before name `attempts` what is now `draws`."""
    count = {"site": "dense_delta", "expected": 3, "executed": 3, "passed": 3}
    gate = {
        "tier": "smoke",
        "subjects": ["torch"],
        "duration_s": 61.0,
        "machine": {"name": "a laptop"},
        "counts": [count],
    }
    counts = [{"counts": {"torch/dense_delta": count}}] * 2
    seeds = {"subjects": ["torch"], "duration_s": 125.0, key: 2, "seeds": counts}
    first = "torch with 2 seeds (2 min 05 s): 6 trials; no failures."
    assert gate_sentences(gate, [seeds]).endswith(first)
    later = {"subjects": ["a", "b"], "shards": 3, "mps": True}
    said = gate_sentences(gate, [seeds, seeds | later])
    times = "3 shards of up to 2 min 05 s, MPS"
    assert said.endswith(f"{first} a and b with 2 seeds ({times}): 6 trials; no failures.")


def test_a_record_of_some_case_files_names_them_and_the_tier() -> None:
    count = {"executed": 3, "expected": 3, "passed": 3, "subject": "torch", "site": "engine"}
    seeds = {"subjects": ["torch"], "duration_s": 125.0, "seeds": [{"counts": {"a": count}}] * 2}
    gate = seeds | {"counts": [count], "tier": "premerge", "machine": {"name": "NVIDIA H200"}}
    of_files = {"tier": "nightly", "matrix": ["cases/engine.yaml", "mine.yaml"]}
    said = gate_sentences(gate, [seeds | of_files, seeds | {"tier": "premerge"}])
    files = "2 seeds of the nightly cases in cases/engine.yaml, mine.yaml (2 min 05 s): 6 trials"
    assert files in said
    assert said.endswith("torch with 2 seeds (2 min 05 s): 6 trials; no failures.")


@pytest.mark.parametrize(
    ("record", "of_gate", "of_seeds"),
    [
        # a record of before, one of a CPU, and those of one GPU and of two
        ({}, "took 1 min 01 s on NVIDIA H200:", "2 seeds (1 min 01 s):"),
        ({"gpus": 0}, "took 1 min 01 s on NVIDIA H200:", "2 seeds (1 min 01 s):"),
        ({"gpus": 1}, "took 1 min 01 s on one NVIDIA H200:", "2 seeds (1 min 01 s):"),
        ({"gpus": 2}, "took 1 min 01 s on 2 x NVIDIA H200:", "2 seeds (1 min 01 s, 2 GPUs):"),
        ({"gpus": 2, "mps": True}, "on 2 x NVIDIA H200:", "2 seeds (1 min 01 s, 2 GPUs, MPS):"),
    ],
)
def test_the_time_of_a_gate_is_shown_with_the_gpus_that_it_had(
    record: dict[str, Any], of_gate: str, of_seeds: str
) -> None:
    count = {"site": "dense_delta", "expected": 3, "executed": 3, "passed": 3}
    section = {"tier": "premerge", "subjects": ["a"], "duration_s": 61.0, "counts": [count]}
    section |= {"machine": {"name": "NVIDIA H200"}, "seeds": [{"counts": {"a": count}}] * 2}
    said = gate_sentences(section | record, [section | record])
    assert of_gate in said
    assert of_seeds in said


def test_the_page_of_findings_is_written_whole(copied: Path) -> None:
    findings = copied / FINDINGS
    findings.write_text(findings.read_text().replace("title: ", "title: New ", 1))
    assert list(stale_parts(copied)) == ["docs/findings.md"]
    assert main(["docs"]) == ExitCode.OK
    assert list(stale_parts(copied)) == []


def test_a_page_without_a_marker_is_a_usage_error(
    copied: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = copied / "docs/faults.md"
    page.write_text(page.read_text().replace("<!-- kill rates: end -->", ""))
    assert main(["docs"]) == ExitCode.USAGE
    message = "loragate docs: docs/faults.md: must hold <!-- kill rates: end --> once (got 0)\n"
    assert capsys.readouterr().err == message


@pytest.mark.parametrize(
    ("section", "field", "where"),
    [
        ("scan", "overhead", "docs/nightly.md: block 'scans': a record of ci/results: "),
        ("bench_moe", "aligns", "docs/img: ci/results/nvidia-h200.json: "),
    ],
)
def test_a_damaged_record_is_a_usage_error_that_names_what_shows_it(
    section: str,
    field: str,
    where: str,
    copied: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = read_section(copied / GPU_RECORD, section)
    assert found is not None
    update_section(copied / GPU_RECORD, section, found | {field: "x"})
    blocks = [block for block in BLOCKS if block.name == "scans"]
    monkeypatch.setattr("loragate.docs.pages.BLOCKS", blocks)
    assert main(["docs", "--check"]) == ExitCode.USAGE
    assert capsys.readouterr().err.startswith(f"loragate docs: {where}")


def test_a_missing_section_is_a_usage_error(
    copied: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (copied / GPU_RECORD).unlink()
    assert main(["docs", "--check"]) == ExitCode.USAGE
    assert f"{GPU_RECORD}: no such file" in capsys.readouterr().err


def test_a_block_is_replaced_between_its_markers_alone() -> None:
    text = "a\n<!-- x: begin -->\nold\n<!-- x: end -->\nb\n"
    assert content_of(text, "x", page="p.md") == "old"
    assert replaced(text, "x", "new", page="p.md") == text.replace("old", "new")
    for name in ("y", "x: begin -->\nold\n<!-- x"):
        with pytest.raises(BlockError, match=r"^p\.md: must hold"):
            content_of(text, name, page="p.md")


def test_blocks_have_names_that_are_unique_on_their_page() -> None:
    names = [(block.page, block.name) for block in BLOCKS]
    assert len(set(names)) == len(names)


PLOT = Plot("p", "A plot", "us", (Panel("one", (Series("ours", 16, ((1, 2.0), (16, 5.0))),)),))


def test_a_plot_that_was_written_is_current_and_drawn_the_same_again(tmp_path: Path) -> None:
    (path,) = write_plots([PLOT], tmp_path)
    assert is_current(PLOT, tmp_path)
    assert draw(PLOT) == path.read_text() == draw(PLOT)
    other = Plot("p", "A plot", "us", (Panel("one", (Series("ours", 16, ((1, 2.1),)),)),))
    assert not is_current(other, tmp_path)
    # the digest stands at the begin
    whole = path.read_text()
    for size in (len(whole) // 2, len(whole) - 1):
        path.write_text(whole[:size])
        assert not is_current(PLOT, tmp_path)


def test_a_plot_of_the_record_has_a_line_for_each_subject_and_rank() -> None:
    plots = {plot.name: plot for plot in plots_of(project_root() / GPU_RECORD)}
    for name, panels in (("lora-tax-dense", 3), ("lora-tax-moe", 4)):
        plot = plots[name]
        assert len(plot.panels) == panels
        for panel in plot.panels:
            assert {(s.subject, s.rank) for s in panel.series} == {
                (subject, rank) for subject in ("lorakernels", "vllm") for rank in (16, 64)
            }
            assert all(series.points for series in panel.series)


def test_without_matplotlib_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingMatplotlib, match=r"install the extra loragate\[test\]"):
        draw(PLOT)
    record = str(project_root() / GPU_RECORD)
    assert main(["bench", "plot", record, "--out", str(tmp_path)]) == ExitCode.INFRASTRUCTURE
    assert "plots need matplotlib" in capsys.readouterr().err


def test_bench_plot_writes_the_plots_of_a_record(tmp_path: Path) -> None:
    record = str(project_root() / GPU_RECORD)
    assert main(["bench", "plot", record, "--out", str(tmp_path)]) == ExitCode.OK
    assert all(is_current(plot, tmp_path) for plot in plots_of(Path(record)))
    assert main(["bench", "plot", str(tmp_path / "no.json"), "--out", "x"]) == ExitCode.USAGE


@pytest.mark.parametrize(("tree", "said"), [("clean", ""), ("dirty", " and changes to it")])
def test_a_record_of_a_changed_tree_is_not_shown_as_one_of_its_commit(tree: str, said: str) -> None:
    section = {
        "recorded_at": "2026-11-28T20:40:13+00:00",
        "commit": "ad6cf7d0282c",
        "tree": tree,
        "machine": {"name": "a GPU"},
        "versions": {"torch": "2.11.0"},
    }
    line = provenance_line(section)
    assert line == f"Recorded 2026-11-28 at commit ad6cf7d{said}, a GPU, torch 2.11.0."
