"""The command, without planting anything: what it refuses, shows and records."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from loragate.cli import main
from loragate.commands import mutants as command
from loragate.core.verdict import ExitCode
from loragate.mutants.generation.sampling import sample
from loragate.mutants.model import Fate, Group, Mutant, Result
from loragate.mutants.page import render_page
from loragate.mutants.record import (
    FIRST_SECTION,
    SECTION,
    SURVIVORS,
    Run,
    left_by_samples,
    payload,
    render_record,
    save_first,
    save_run,
)
from loragate.mutants.sources import read_sources
from loragate.records.recorder import Recorder
from loragate.records.results import require_section

SOURCES = {"a.py": "x = 1\n", "b.py": "y = 2\n"}
EDIT = "- {id: one, module: dense/launch.py, old: import math, new: import cmath, kind: other}\n"


def outcome(name: str, module: str, group: Group, fate: Fate) -> tuple[Mutant, Result]:
    mutant = Mutant(
        id=name,
        module=module,
        start=4,
        end=5,
        new="3",
        operator="number",
        group=group,
        line=1,
        end_line=1,
    )
    return mutant, Result(id=name, fate=fate, judge="reference", killer="case")


OUTCOMES = [
    outcome("k1", "a.py", Group.SUBTLE, Fate.KILLED),
    outcome("k2", "a.py", Group.SUBTLE, Fate.KILLED),
    outcome("s1", "b.py", Group.SUBTLE, Fate.SURVIVED),
    outcome("e1", "b.py", Group.COARSE, Fate.EQUIVALENT),
]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--sample", "0"], "must be a number from 1 up"),
        (["--sample", "2", "--edits", "x"], "not allowed with"),
        ([], "is required"),
        (["--sample", "2", "--module", "nowhere/*"], "no module like"),
        (["--sample", "2", "--module", "dense/*", "--record", "x.json"], "leave out --module"),
        (["--sample", "2", "--list", "--record", "x.json"], "leave out --record"),
        (["--sample", "2", "--operator", "edge", "--record", "x.json"], "leave out --operator"),
        (
            ["--sample", "2", "--module", "dense/launch.py", "--operator", "no-such"],
            "no operator like 'no-such'",
        ),
        (["--edits", "nowhere.yaml", "--operator", "edge"], "leave it out without --sample"),
        (["--survivors", "x.json", "--operator", "edge"], "leave it out without --sample"),
        (["--survivors", "nowhere.json"], "nowhere.json: no such file"),
        (["--edits", "nowhere.yaml"], "cannot be read"),
    ],
)
def test_wrong_arguments_are_refused(
    arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code = main(["mutants", *arguments])
    except SystemExit as error:
        code = int(str(error.code))
    assert code == ExitCode.USAGE
    assert text in capsys.readouterr().err


@pytest.mark.parametrize("folder", ["/proc/x", "/proc/x/y", "a-file", "a-file/below"])
def test_a_folder_that_takes_no_files_is_refused_before_anything_is_planted(
    folder: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a-file").touch()
    Path("edits.yaml").write_text(EDIT, encoding="utf-8")
    code = main(["mutants", "--edits", "edits.yaml", "--folder", folder])
    error = capsys.readouterr().err
    assert code == ExitCode.USAGE
    assert error.startswith(f"loragate mutants: {Path(folder).resolve()}: cannot be written: ")
    assert error.count("\n") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a-file", "edits.yaml"]


def test_the_list_shows_each_mutant_as_a_diff(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "edits.yaml"
    path.write_text(EDIT, encoding="utf-8")
    assert main(["mutants", "--edits", str(path), "--list"]) == ExitCode.OK
    out = capsys.readouterr().out
    assert "one\n--- a/dense/launch.py" in out
    assert "-import math\n+import cmath" in out


def test_the_list_says_which_mutants_are_listed_as_equivalent(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "edits.yaml"
    alike = "- {id: two, module: common/stacked_weights.py, old: 'factors, self.slice_widths,"
    alike += " strict=True', new: 'factors, self.slice_widths', kind: other}\n"
    path.write_text(EDIT + alike, encoding="utf-8")
    assert main(["mutants", "--edits", str(path), "--list"]) == ExitCode.OK
    out = capsys.readouterr().out
    assert "one\n--- a/" in out
    assert "two is equivalent: The number of factors is that of the slices" in out


def test_a_retired_edit_is_named_and_not_planted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "edits.yaml"
    gone = (
        EDIT.replace("one", "two").replace("launch.py", "gone.py").replace("}", ", retired: gone}")
    )
    path.write_text(EDIT + gone, encoding="utf-8")
    assert main(["mutants", "--edits", str(path), "--list"]) == ExitCode.OK
    out = capsys.readouterr().out
    assert "RETIRED two, not planted: gone" in out
    assert "two\n---" not in out


def test_retired_edits_are_recorded_apart_from_the_counts(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    run = Run("state", OUTCOMES, {"old": "gone"})
    save_run(Recorder.open(path, SECTION, commit="c"), "edits-x", run)
    section = require_section(path, SECTION)
    assert section["runs"]["edits-x"]["retired"] == {"old": "gone"}
    text = render_record(section, None)
    assert "| edits-x, subtle | 3 | 2 | 1 |" in text
    assert "not counted above: edits-x: 1" in text


def survivor_of(*ids: str, fate: Fate = Fate.SURVIVED) -> Run:
    return Run("state", [outcome(name, "a.py", Group.COARSE, fate) for name in ids])


def test_a_survivor_is_left_by_samples_alone_and_once() -> None:
    fates = {"a": Fate.SURVIVED, "b": Fate.EQUIVALENT, "c": Fate.NEEDS_GPU, "d": Fate.SURVIVED}
    run = {"not_killed": {name: fate.value for name, fate in fates.items()}}
    other = {"not_killed": {"e": Fate.SURVIVED.value, "d": Fate.SURVIVED.value}}
    runs = {"sample-9-seed-1": run, "sample-9-seed-2": run, "edits-x": other, SURVIVORS: other}
    assert left_by_samples(runs) == ["a", "d"]


def test_what_samples_have_left_is_planted_once_more_and_what_is_gone_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("cosmic_ray")
    path, module = tmp_path / "results.json", "common/sizes.py"
    first, second, killed = sample({module: read_sources()[module]}, 3, seed=0)
    gone = f"{module}:edge:00000000"
    runs = {
        "sample-3-seed-0": survivor_of(first.id, gone),
        # in two samples
        "sample-3-seed-1": survivor_of(first.id, second.id),
        "sample-3-seed-2": survivor_of(killed.id, fate=Fate.KILLED),
        "edits-x": survivor_of("an-edit"),
    }
    for name, run in runs.items():
        save_run(Recorder.open(path, SECTION, commit="c"), name, run)
    assert main(["mutants", "--survivors", str(path), "--list"]) == ExitCode.OK
    out = capsys.readouterr().out
    assert (out.count(f"{first.id}\n---"), out.count(f"{second.id}\n---")) == (1, 1)
    assert out.count("\n---") == 2
    assert f"RETIRED {gone}, not planted: its text is gone" in out
    assert "an-edit" not in out


@pytest.mark.parametrize(
    "section", [{}, {"runs": []}, {"runs": {"sample-1-seed-1": {}}}, {"runs": {"sample-x": [1]}}]
)
def test_a_record_without_runs_of_mutants_is_a_usage_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], section: dict[str, object]
) -> None:
    path = tmp_path / "cpu.json"
    path.write_text(json.dumps({"schema": 1, "sections": {SECTION: section}}))
    assert main(["mutants", "--survivors", str(path), "--list"]) == ExitCode.USAGE
    error = capsys.readouterr().err
    assert f"{path}: section 'mutants' has no runs as this command records them" in error
    assert "Traceback" not in error


def test_survivors_of_other_modules_are_neither_planted_nor_gone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("cosmic_ray")
    path, module = tmp_path / "results.json", "common/sizes.py"
    (here,) = sample({module: read_sources()[module]}, 1, seed=0)
    run = survivor_of(here.id, "moe/tiles.py:edge:00000000")
    save_run(Recorder.open(path, SECTION, commit="c"), "sample-1-seed-0", run)
    assert main(["mutants", "--survivors", str(path), "--module", "common/*", "--list"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"{here.id}\n---")
    assert "RETIRED" not in out


def test_survivors_that_were_planted_again_are_a_run_of_their_own_and_in_no_other_table(
    tmp_path: Path,
) -> None:
    path = tmp_path / "results.json"
    for name in ("sample-3-seed-0", SURVIVORS):
        save_run(Recorder.open(path, SECTION, commit="c"), name, Run("state", OUTCOMES))
    text = render_record(require_section(path, SECTION), None)
    assert f"| {SURVIVORS}, subtle | 3 | 2 | 1 |" in text
    assert "| a.py | 2 | 2 | 0 |" in text


def test_edits_that_an_earlier_record_only_lists_as_not_planted_are_counted_apart() -> None:
    run = payload("c", Run("state", OUTCOMES))
    del run["retired"]
    text = render_record(None, {"runs": {"edits-x": run | {"not_planted": ["one", "two"]}}})
    assert "not counted above: edits-x, first run: 2" in text


def test_a_survivor_makes_the_run_wrong_and_an_equivalent_does_not() -> None:
    assert command.exit_code(OUTCOMES) is ExitCode.WRONG
    assert command.exit_code([OUTCOMES[0], OUTCOMES[3]]) is ExitCode.OK
    broken = outcome("b1", "a.py", Group.SUBTLE, Fate.BROKEN)
    assert command.exit_code([*OUTCOMES, broken]) is ExitCode.INFRASTRUCTURE


def test_the_page_has_the_rates_and_the_diffs_of_survivors() -> None:
    page = render_page("Mutants", OUTCOMES, SOURCES)
    assert "| subtle | 3 | 2 | 1 | 0 | 0 | 0 | 66.7 % |" in page
    assert "| b.py | 1 | 0 | 1 | 0 | 0 | 0 | 0.0 % |" in page
    assert "-y = 2\n+y = 3" in page
    assert "- `k1`: reference" in page


def test_runs_are_recorded_side_by_side_and_the_first_verdicts_stay(tmp_path: Path) -> None:
    path = tmp_path / "results.json"

    def recorder(section: str) -> Recorder:
        return Recorder.open(path, section, commit="c")

    save_run(recorder(SECTION), "sample-4-seed-0", Run("state", OUTCOMES))
    save_run(recorder(SECTION), "sample-4-seed-1", Run("state", OUTCOMES[:2]))
    assert save_first(recorder(FIRST_SECTION), "edits-x", Run("state", OUTCOMES))
    assert not save_first(recorder(FIRST_SECTION), "edits-x", Run("state", OUTCOMES[:2]))
    assert save_first(recorder(FIRST_SECTION), "edits-y", Run("state", OUTCOMES[:2]))
    runs = require_section(path, SECTION)["runs"]
    assert sorted(runs) == ["sample-4-seed-0", "sample-4-seed-1"]
    assert runs["sample-4-seed-0"]["not_killed"] == {"s1": "survived", "e1": "equivalent"}
    first = require_section(path, FIRST_SECTION)
    assert first["runs"]["edits-x"]["not_killed"] == {"s1": "survived", "e1": "equivalent"}
    text = render_record(require_section(path, SECTION), first)
    assert "| sample-4-seed-0, subtle | 3 | 2 | 1 |" in text
    assert "| edits-x, first run, subtle | 3 |" in text
    assert "| edits-y, first run, " in text
    assert json.loads(path.read_text())["schema"] == 1


def test_a_page_without_records_says_so() -> None:
    assert render_record(None, None) == "Not recorded yet."
