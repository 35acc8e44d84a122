from __future__ import annotations

import errno
import json
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest

from loragate.core.checkout import Tree, commit_and_tree
from loragate.core.errors import CommandError
from loragate.core.machine import Machine
from loragate.core.verdict import ExitCode
from loragate.mutants.record import SECTION, Run, save_run
from loragate.records import recorder, results
from loragate.records.recorder import Recorder
from loragate.records.results import ResultsError, provenance, read_section, update_section


def test_a_section_is_replaced_as_a_whole_and_the_others_stay(tmp_path: Path) -> None:
    path = tmp_path / "results" / "gpu.json"
    update_section(path, "gate", {"expected": 3, "executed": 3})
    update_section(path, "bench_dense", {"rows": [1]})
    update_section(path, "gate", {"executed": 4})
    assert read_section(path, "gate") == {"executed": 4}
    assert read_section(path, "bench_dense") == {"rows": [1]}
    assert read_section(path, "seeds") is None


def test_runs_that_record_at_the_same_time_lose_nothing_of_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, read = tmp_path / "gpu.json", results._read

    def slowly(found: Path) -> dict[str, Any]:
        document = read(found)
        time.sleep(0.02)
        return document

    monkeypatch.setattr(results, "_read", slowly)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda turn: update_section(path, f"run{turn}", {"turn": turn}), range(8)))
    assert [read_section(path, f"run{turn}") for turn in range(8)] == [
        {"turn": turn} for turn in range(8)
    ]
    assert [entry.name for entry in tmp_path.iterdir()] == ["gpu.json"]


def test_runs_that_record_into_one_section_at_the_same_time_lose_nothing_of_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, both = tmp_path / "cpu.json", Barrier(2, timeout=10)
    runs = {name: Recorder.open(path, SECTION, commit="abc") for name in ("first", "second")}

    def origin(*given: object, **named: object) -> dict[str, Any]:
        both.wait()
        return {}

    monkeypatch.setattr(recorder, "provenance", origin)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda name: save_run(runs[name], name, Run("", ())), runs))
    section = read_section(path, SECTION)
    assert section is not None
    assert sorted(section["runs"]) == ["first", "second"]


def test_figures_that_json_cannot_hold_end_a_command_with_the_name_of_the_file(
    tmp_path: Path,
) -> None:
    path = tmp_path / "gpu.json"
    with pytest.raises(CommandError, match=f"{path}: cannot hold what was found") as error:
        Recorder.open(path, "gate").save({"us": float("inf")})
    assert error.value.exit_code is ExitCode.INFRASTRUCTURE


def test_the_file_is_sorted_and_ends_with_a_newline_so_that_a_diff_shows_figures_alone(
    tmp_path: Path,
) -> None:
    left, right = tmp_path / "left.json", tmp_path / "right.json"
    update_section(left, "b", {"y": 1, "x": 2})
    update_section(left, "a", {})
    update_section(right, "a", {})
    update_section(right, "b", {"x": 2, "y": 1})
    assert left.read_bytes() == right.read_bytes()
    assert left.read_text().endswith("}\n")


def test_a_payload_that_json_cannot_hold_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "gpu.json"
    update_section(path, "gate", {"executed": 1})
    with pytest.raises(ValueError, match="Out of range float"):
        update_section(path, "gate", {"executed": float("nan")})
    assert read_section(path, "gate") == {"executed": 1}
    assert [entry.name for entry in tmp_path.iterdir()] == ["gpu.json"]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("[]", "not a results file: there is no object named 'sections'"),
        ('{"schema": 2, "sections": {}}', "schema is 2, this version reads 1 to 1"),
        ('{"schema": "1", "sections": {}}', "schema is '1', this version reads 1 to 1"),
        ('{"sections": {}}', "schema is None, this version reads 1 to 1"),
        ('{\n"schema":', ":2: not JSON"),
        ("[" * 100_000, "is nested too deeply"),
        ("\udcff", "can't decode byte 0xff"),
        ('{"schema": 1, "sections": {"x": {"us": NaN}}}', "NaN is no number of JSON"),
        ('{"schema": 1, "sections": {"gate": 5}}', r"section 'gate' must be an object \(got 5\)"),
        ('{"schema": 1, "sections": {"x": [1]}}', r"section 'x' must be an object \(got \[1\]\)"),
    ],
)
def test_a_file_that_cannot_be_read_is_never_overwritten(
    tmp_path: Path, text: str, complaint: str
) -> None:
    path = tmp_path / "gpu.json"
    path.write_text(text, errors="surrogateescape")
    with pytest.raises(ResultsError, match=complaint) as error:
        update_section(path, "gate", {})
    assert str(path) in str(error.value)
    assert path.read_text(errors="surrogateescape") == text


def test_a_disk_that_cannot_be_read_costs_no_section(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(path: Path) -> bytes:
        raise OSError(errno.EIO, "Input/output error")

    path = tmp_path / "gpu.json"
    update_section(path, "gate", {"executed": 1})
    with monkeypatch.context() as disk:
        disk.setattr(Path, "read_bytes", failing)
        with pytest.raises(ResultsError, match=r"gpu\.json: Input/output error"):
            update_section(path, "scan", {})
    assert read_section(path, "gate") == {"executed": 1}


def test_provenance_names_code_versions_and_machine_but_no_path_on_the_disk() -> None:
    origin = provenance(Machine("cuda", "NVIDIA H200", (9, 0), 132, 1 << 37), commit="abc")
    assert origin["machine"]["compute_capability"] == [9, 0]
    assert origin["tree"] in ("clean", "dirty", "unknown")
    assert origin["commit"]
    assert "python" in origin["versions"]
    assert str(Path.home()) not in json.dumps(origin)


@pytest.mark.parametrize("name", ["ci/results/new.json", "kept.json"])
def test_the_record_itself_does_not_make_the_tree_dirty_but_any_other_file_does(
    tmp_path: Path, name: str
) -> None:
    def git(*arguments: str) -> None:
        options = ["-c", "user.name=a", "-c", "user.email=a@b"]
        subprocess.run(["git", *options, *arguments], cwd=tmp_path, check=True)

    git("init", "-q")
    (tmp_path / "kept.json").write_text("{}")
    git("add", ".")
    git("commit", "-q", "-m", "all")
    record = tmp_path / name
    record.parent.mkdir(parents=True, exist_ok=True)
    record.write_text("{ }")
    assert commit_and_tree(tmp_path)[1] is Tree.DIRTY
    assert commit_and_tree(tmp_path, ignoring=record)[1] is Tree.CLEAN
    (record.parent / "other.json").write_text("{}")
    assert commit_and_tree(tmp_path, ignoring=record)[1] is Tree.DIRTY


@pytest.mark.parametrize("edited", [("made meanwhile", Tree.CLEAN), ("first", Tree.DIRTY)])
@pytest.mark.parametrize(("noted", "tree"), [(False, "clean"), (True, "dirty")])
def test_a_record_names_the_code_of_the_start_of_the_run(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    noted: bool,
    tree: str,
    edited: tuple[str, Tree],
) -> None:
    checkouts = [("first", Tree.CLEAN)]
    monkeypatch.setattr(recorder, "commit_and_tree", lambda *_, **__: checkouts[-1])
    opened = Recorder.open(tmp_path / "gpu.json", "gate")
    checkouts.append(edited)
    if noted:
        opened.note_edits()
    opened.save({"executed": 4})
    section = read_section(tmp_path / "gpu.json", "gate")
    assert section is not None
    assert (section["commit"], section["tree"], section["executed"]) == ("first", tree, 4)


def test_a_given_commit_stands_for_one_that_is_not_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder, "commit_and_tree", lambda *_, **__: ("", Tree.UNKNOWN))
    opened = Recorder.open(tmp_path / "gpu.json", "gate", commit="abc")
    opened.save({})
    section = read_section(tmp_path / "gpu.json", "gate")
    assert section is not None
    assert opened.commit == section["commit"] == "abc"
    # and for no other
    monkeypatch.setattr(recorder, "commit_and_tree", lambda *_, **__: ("known", Tree.CLEAN))
    Recorder.open(tmp_path / "gpu.json", "gate", commit="abc").save({})
    section = read_section(tmp_path / "gpu.json", "gate")
    assert section is not None
    assert section["commit"] == "known"


def test_a_file_that_breaks_during_a_run_ends_the_command_as_an_infrastructure_failure(
    tmp_path: Path,
) -> None:
    path = tmp_path / "gpu.json"
    opened = Recorder.open(path, "gate")
    path.write_text("[]")
    with pytest.raises(CommandError, match="not a results file") as error:
        opened.save({})
    assert error.value.exit_code is ExitCode.INFRASTRUCTURE
    assert path.read_text() == "[]"
