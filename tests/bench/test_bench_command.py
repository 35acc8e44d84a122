from __future__ import annotations

from pathlib import Path

import pytest

from loragate.bench.bars import Bar
from loragate.bench.figures import DenseFigures, RowFigures
from loragate.bench.graphs_figures import GraphFigures
from loragate.bench.kinds import KINDS
from loragate.bench.moe_figures import LayerFigures, MoEFigures
from loragate.bench.moe_rows import LayerRow
from loragate.bench.rows import dense_rows
from loragate.bench.text import markdown_bars
from loragate.cli import main
from loragate.core.machine import Machine, detect_machine
from loragate.core.verdict import ExitCode
from loragate.records.results import update_section


def bench(*arguments: str) -> ExitCode:
    return ExitCode(main(["bench", *arguments]))


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "loragate.core.machine.detect_machine", lambda: Machine("cpu", "", None, 1, 0)
    )


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize("kind", KINDS)
def test_without_a_gpu_nothing_is_timed_and_the_exit_code_is_3(
    capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    assert bench(kind) is ExitCode.INFRASTRUCTURE
    assert "bench times compiled kernels and needs a GPU" in capsys.readouterr().err


def test_an_unknown_row_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench("dense", "--rows", "qvk.m1.r16") is ExitCode.USAGE
    said = capsys.readouterr().err
    assert "--rows 'qvk.m1.r16' matches none" in said
    assert said.endswith("; did you mean 'qkv.m1.r16'?\n")


@pytest.mark.usefixtures("no_gpu")
def test_a_seed_decides_which_rows_of_streams_there_are(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    drawn, of_seed_1 = ("streams", "--rows", "drawn.qwen2_5_7b.down.m15.r8"), ("--seed", "1")
    assert bench(*drawn) is bench(*drawn, *of_seed_1) is ExitCode.INFRASTRUCTURE
    assert bench(*drawn, "--seed", "2") is ExitCode.USAGE
    assert "matches none of the 122 rows" in capsys.readouterr().err
    # any seed gives a whole table
    record = str(tmp_path / "record.json")
    assert bench("streams", "--seed", "2", "--record", record) is ExitCode.INFRASTRUCTURE
    with pytest.raises(SystemExit):
        bench("graphs", "--seed", "2")


def test_a_part_of_the_table_cannot_be_recorded(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    record = tmp_path / "record.json"
    assert bench("dense", "--rows", "qkv.*", "--record", str(record)) is ExitCode.USAGE
    assert "--record takes the whole table" in capsys.readouterr().err
    assert not record.exists()


def test_a_damaged_results_file_is_reported_before_anything_is_timed(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    record = tmp_path / "record.json"
    record.write_text("{\n nothing")
    assert bench("dense", "--record", str(record)) is ExitCode.USAGE
    assert f"{record}:2: not JSON" in capsys.readouterr().err


def test_moe_is_compared_with_vllm_or_with_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench("moe", "--baseline", "torch")
    assert "vllm" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        bench("moe", "--subject", "torch")


def test_a_kind_without_a_baseline_asks_for_none(monkeypatch: pytest.MonkeyPatch) -> None:
    found, given = [], []

    def find(name: str) -> str:
        found.append(name)
        return name

    def run(candidate: str, baseline: str | None, *_: object) -> GraphFigures:
        given.append(baseline)
        return GraphFigures(candidate, ())

    monkeypatch.setattr(
        "loragate.core.machine.detect_machine", lambda: Machine("cuda", "GPU", None, 1, 0)
    )
    monkeypatch.setattr("loragate.bench.contender.find_contender", find)
    monkeypatch.setattr("loragate.bench.graphs.run_graphs", run)
    assert bench("graphs") is ExitCode.INCOMPLETE
    assert (found, given) == (["lorakernels"], [None])
    with pytest.raises(SystemExit):
        bench("graphs", "--baseline", "vllm")


def test_an_moe_record_is_shown_by_its_kind(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    record = tmp_path / "record.json"
    layer = LayerFigures(LayerRow(1), 10.0, 11.0, None, {})
    run = MoEFigures("ours", None, 4e12, (layer,))
    update_section(record, KINDS["moe"].section, run.payload())
    assert bench("show", str(record), "moe") is ExitCode.OK
    assert "| 1 | 10.0 | 11.0 | 10% |" in capsys.readouterr().out
    assert bench("show", str(record)) is ExitCode.USAGE


@pytest.mark.skipif(detect_machine().device != "cuda", reason="needs a GPU to get that far")
def test_an_unknown_subject_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench("dense", "--baseline", "vlm") is ExitCode.USAGE
    assert "did you mean 'vllm'?" in capsys.readouterr().err


def test_a_record_is_shown_as_a_table_followed_by_its_bars(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    record = tmp_path / "record.json"
    rows = tuple(RowFigures(row, 9.0, {"ours": 10.0}, {"ours": 1.0}) for row in dense_rows())
    update_section(
        record, KINDS["dense"].section, DenseFigures("ours", None, 4e12, rows, ()).payload()
    )
    assert bench("show", str(record)) is ExitCode.OK
    shown = capsys.readouterr().out
    assert "| down 12288 -> 4096 | 1 | 16 | 9.0 | 1.0 | - |" in shown
    assert "* added time over a baseline, worst row: **-** (not measured: bar 1.0)" in shown
    assert bench("show", str(tmp_path / "other.json")) is ExitCode.USAGE
    assert "other.json: no such file" in capsys.readouterr().err
    update_section(record, "else", {})
    assert bench("show", str(record), "moe") is ExitCode.USAGE
    problem = "record.json: no section 'bench_moe'; recorded are: bench_dense, else"
    assert problem in capsys.readouterr().err


@pytest.mark.parametrize(
    ("section", "problem"),
    [
        ({}, "no field 'schema'"),
        ({"schema": "1"}, "schema is '1', this version reads up to "),
        ({"schema": 1, "candidate": "ours", "baseline": None}, "no field "),
    ],
)
@pytest.mark.parametrize("kind", KINDS)
def test_an_invalid_section_is_reported_with_its_file_and_field(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    section: dict[str, object],
    problem: str,
    kind: str,
) -> None:
    record, name = tmp_path / "record.json", KINDS[kind].section
    update_section(record, name, section)
    assert bench("show", str(record), kind) is ExitCode.USAGE
    assert f"{record}: section {name!r}: {problem}" in capsys.readouterr().err


@pytest.mark.parametrize("base_us", [None, "9", {}])
def test_a_damaged_figure_is_reported_with_its_file_when_its_record_is_shown_or_plotted(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, base_us: object
) -> None:
    record = tmp_path / "record.json"
    rows = tuple(RowFigures(row, 9.0, {"ours": 10.0}, {"ours": 1.0}) for row in dense_rows())
    section = DenseFigures("ours", None, 4e12, rows, ()).payload()
    section["rows"][3]["base_us"] = base_us
    update_section(record, KINDS["dense"].section, section)
    update_section(record, KINDS["moe"].section, MoEFigures("ours", None, 4e12, ()).payload())
    assert bench("show", str(record)) is ExitCode.USAGE
    said = capsys.readouterr().err
    assert said.startswith(f"loragate bench: {record}: section 'bench_dense': ")
    assert "Traceback" not in said
    assert bench("plot", str(record), "--out", str(tmp_path / "plots")) is ExitCode.USAGE
    assert capsys.readouterr().err.startswith(f"loragate bench: {record}: ")


def test_a_bar_that_is_missed_or_was_not_measured_says_so() -> None:
    bars = [Bar("a", 1.0, 0.5), Bar("b", 1.0, 1.002, note="aim 0.9"), Bar("c", 1.0, None)]
    assert markdown_bars(bars) == [
        "* a: **0.500** (bar 1.0)",
        "* b: **1.002** (missed: bar 1.0, aim 0.9)",
        "* c: **-** (not measured: bar 1.0)",
    ]
