"""The same arguments select the same runs in the same order."""

from __future__ import annotations

import shlex
import sys
from argparse import ArgumentParser
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from _pytest.config.argparsing import Parser

from loragate.commands.selection_options import add_selection_options, selection_from
from loragate.core.checkout import project_root
from loragate.matrix.case import Case, Dtype, Site, Tier
from loragate.matrix.case_run import CaseRun, find_run
from loragate.matrix.ids import case_id
from loragate.matrix.load import default_files
from loragate.matrix.patterns import SelectionError
from loragate.matrix.replay_command import replay_command
from loragate.matrix.selection import Selection, select_one, select_runs
from loragate.matrix.shards import Shard
from loragate.plugin import options
from loragate.plugin.collection import selected_runs

CASE = Case(
    site=Site.DENSE_DELTA,
    tokens=5,
    in_features=16,
    slices=(16,),
    rank=8,
    slots=2,
    dtype=Dtype.FP32,
)
CASES = (CASE, replace(CASE, tokens=6), replace(CASE, tokens=7, tier=Tier.PREMERGE))


def test_a_session_has_a_test_for_each_draw_and_repeat(tmp_path):
    parser = Parser(_ispytest=True)
    options.pytest_addoption(parser)
    matrix = Path(__file__).parent / "misbehaving" / "four_good.yaml"
    given = ["--loragate-draw=0", "--loragate-draw=3", "--loragate-repeats=2"]
    option = parser.parse_known_args(
        [*given, f"--loragate-matrix={matrix}", "--loragate-subject=torch"]
    )
    session = SimpleNamespace(option=option, rootpath=tmp_path, stash=pytest.Stash())
    runs = selected_runs(session)
    assert [runs[name].id for name in runs] == list(runs)
    trials = [(0, 0), (0, 1), (3, 0), (3, 1)]
    assert sorted((run.case.tokens, run.draw, run.repeat) for run in runs.values()) == [
        (tokens, *trial) for tokens in (21, 22, 23, 24) for trial in trials
    ]


@pytest.mark.parametrize(
    ("draws", "selected"), [((), (0,)), (("--draw=4",), (4,)), (("--seeds=3",), (0, 1, 2))]
)
def test_a_command_selects_what_its_options_say(tmp_path, draws, selected):
    parser = ArgumentParser()
    add_selection_options(parser)
    options = ("--subject=a", "--subject=m:b", "--tier=nightly", "--repeats=3", "--shard=2/3")
    given = (*options, "--cases=x", "--cases=y", f"--matrix={tmp_path / 'a.yaml'}", *draws)
    assert selection_from(parser.parse_args(given), has_gpu=False) == Selection(
        matrix=(tmp_path / "a.yaml",),
        subjects=("a", "m:b"),
        tier=Tier.NIGHTLY,
        draws=selected,
        repeats=3,
        patterns=("x", "y"),
        shard=Shard(index=2, count=3, of_gate=True),
    )


def selection(**changes: object) -> Selection:
    wanted = {"matrix": (), "subjects": ("a", "b"), "tier": Tier.SMOKE, **changes}
    return Selection(**wanted)


def test_the_order_of_cases_and_subjects_does_not_matter():
    one = select_runs(selection(draws=(0, 1), repeats=3), CASES)
    others = selection(draws=(1, 0), repeats=3, subjects=("b", "a"))
    assert [run.id for run in one] == [run.id for run in select_runs(others, reversed(CASES))]
    assert len({run.id for run in one}) == len(one) == 24


def test_repeats_of_a_draw_follow_each_other():
    runs = select_runs(selection(draws=(0, 4), repeats=2, patterns=("a.*tokens-5",)), CASES)
    assert [(run.draw, run.repeat) for run in runs] == [(0, 0), (0, 1), (4, 0), (4, 1)]


def test_a_tier_takes_the_cases_of_lower_tiers_too():
    assert len(select_runs(selection(tier=Tier.PREMERGE), CASES)) == 6


def test_a_shard_may_have_as_many_runs_as_a_whole_selection():
    subjects = tuple(f"s{number}" for number in range(1000))
    whole = selection(subjects=subjects, repeats=2501)
    with pytest.raises(SelectionError, match="2000 cases with 1 draw and 2501 repeats are 5002000"):
        select_runs(whole, CASES)
    runs = select_runs(replace(whole, shard=Shard(index=1, count=1000)), CASES)
    assert (len({run.run_id for run in runs}), len(runs)) == (2, 2 * 2501)
    with pytest.raises(SelectionError, match="1000 cases with 1 draw and 5001 repeats are 5001000"):
        select_runs(replace(whole, repeats=5001, shard=Shard(index=1, count=2)), CASES)


def test_patterns_select_by_subject_or_axis():
    runs = select_runs(selection(patterns=("b.*tokens-6",)), CASES)
    assert [(run.subject, run.case.tokens) for run in runs] == [("b", 6)]


@pytest.mark.parametrize("subject", ["lorakernels", "my.package.module:Subject"])
@pytest.mark.parametrize(("draw", "repeat"), [(0, 0), (3, 0), (0, 2), (3, 2)])
def test_an_id_leads_back_to_its_run(subject, draw, repeat):
    run = CaseRun(subject, CASES[1], draw, repeat)
    assert find_run(run.id, CASES) == run


def test_an_id_of_no_case_leads_nowhere():
    assert find_run("lorakernels.dense_delta.tokens-999", CASES) is None
    assert find_run(case_id(CASE), CASES) is None
    for suffix in ("#", "#x", "#1.", "#1.2.3", "#-1"):
        assert find_run(CaseRun("a", CASE).id + suffix, CASES) is None


def test_draws_after_the_first_show_in_the_id_and_change_the_data():
    first, second = CaseRun("a", CASE), CaseRun("a", CASE, draw=1)
    assert first.id == first.run_id
    assert second.id == f"{first.id}#1"
    assert first.seed != second.seed


def test_repeats_after_the_first_show_in_the_id_and_have_the_same_data():
    first, second = CaseRun("a", CASE), CaseRun("a", CASE, repeat=1)
    assert second.id == f"{first.id}#0.1"
    assert first.seed == second.seed


def one(text: str, matrix: tuple[Path, ...] = ()) -> CaseRun:
    return select_one(text, CASES, subjects=("torch", "vllm"), matrix=matrix)


@pytest.mark.parametrize("subject", ["vllm", "my.package.module:Subject"])
def test_a_replay_takes_a_pattern_that_selects_one_case(subject):
    run = CaseRun(subject, CASES[1], matrix=(Path("/my.yaml"),))
    assert one(f"{subject}.dense_delta.tokens-6", run.matrix) == run
    assert one(f"{subject}.tokens-6#3.1", run.matrix) == replace(run, draw=3, repeat=1)
    # an id is that of any subject, also of one that need not exist
    assert one(replace(run, subject="other").id) == CaseRun("other", CASES[1])


def test_a_pattern_that_selects_several_cases_is_refused_with_the_first_of_them():
    with pytest.raises(SelectionError) as caught:
        one("dense_delta")
    head, *lines = str(caught.value).splitlines()
    assert head == "'dense_delta' selects 6 cases, not one:"
    assert lines[0] == f"  {CaseRun('torch', CASE).id}"
    assert (len(lines), lines[-1]) == (6, "  and 1 more")


def _environment_in(folder):
    """A folder with an interpreter and `loragate`, as `bin` of a virtual environment."""
    folder.mkdir()
    for name in ("python", "loragate"):
        (folder / name).touch(mode=0o755)
    return folder


@pytest.fixture
def no_command(monkeypatch, tmp_path):
    """No script of ci/, and an activated environment."""
    for name in ("LORAGATE_COMMAND", "LORAGATE_PYTHON", "PYTHONPATH"):
        monkeypatch.delenv(name, raising=False)
    folder = _environment_in(tmp_path / "bin")
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setattr(sys, "executable", str(folder / "python"))


@pytest.mark.usefixtures("no_command")
@pytest.mark.parametrize(
    ("draw", "repeat", "options"),
    [(0, 0, "--draw 0"), (7, 0, "--draw 7"), (0, 2, "--draw 0 --repeats 3")],
)
def test_a_replay_command_names_the_draw_and_includes_the_repeats_before(draw, repeat, options):
    run = CaseRun("a", CASE, draw, repeat)
    assert run.replay == f"loragate replay {run.run_id} {options}"


@pytest.mark.usefixtures("no_command")
def test_a_replay_command_begins_as_its_reader_can_call_it(monkeypatch):
    # without a script of ci/ the interpreter is that of the activated environment
    monkeypatch.setenv("LORAGATE_PYTHON", "/a b/python")
    assert replay_command("x", 0, 0) == "loragate replay x --draw 0"
    monkeypatch.setenv("LORAGATE_COMMAND", "../ci/loragate")
    command = "LORAGATE_PYTHON='/a b/python' ../ci/loragate replay x --draw 0"
    assert replay_command("x", 0, 0) == command
    monkeypatch.delenv("LORAGATE_PYTHON")
    monkeypatch.setenv("LORAGATE_COMMAND", "../my ci/loragate")
    assert replay_command("x", 0, 0) == "'../my ci/loragate' replay x --draw 0"


@pytest.mark.usefixtures("no_command")
def test_a_replay_command_names_case_files_that_are_not_the_default_ones():
    default = default_files(project_root())
    assert default
    for matrix in (default, default[:1], ()):
        assert replay_command("x", 0, 0, matrix) == "loragate replay x --draw 0"
    own = Path("/my cases/a.yaml")
    command = f"loragate replay x --draw 0 --matrix {default[0]} --matrix '{own}'"
    assert replay_command("x", 0, 0, (default[0], own)) == command


@pytest.mark.usefixtures("no_command")
def test_a_replay_command_finds_the_subject_of_a_user_where_the_run_found_it(monkeypatch):
    root = project_root()
    monkeypatch.setenv("PYTHONPATH", f"{root}/harness:{root}/kernels:src::my lib")
    # which adds the folders of its own checkout
    monkeypatch.setenv("LORAGATE_COMMAND", "ci/loragate")
    assert replay_command("torch.x", 0, 0) == "ci/loragate replay torch.x --draw 0"
    command = "PYTHONPATH='src:my lib' ci/loragate replay mine:Subject.x --draw 0"
    assert replay_command("mine:Subject.x", 0, 0) == command
    monkeypatch.delenv("LORAGATE_COMMAND")
    folders = shlex.quote(f"{root}/harness:{root}/kernels:src:my lib")
    for name in ("torch.x", "mine:Subject.x"):
        command = f"PYTHONPATH={folders} loragate replay {name} --draw 0"
        assert replay_command(name, 0, 0) == command


@pytest.mark.usefixtures("no_command")
def test_a_replay_command_has_the_interpreter_of_the_run(monkeypatch, tmp_path):
    other, linked = _environment_in(tmp_path / "my other"), tmp_path / "linked"
    linked.symlink_to(tmp_path / "bin")
    monkeypatch.setenv("PATH", f"{linked}:{other}")
    assert replay_command("x", 0, 0) == "loragate replay x --draw 0"
    # `loragate` is that of another environment, or of none
    monkeypatch.setattr(sys, "executable", f"{other}/python")
    command = f"'{other}/python' -m loragate replay x --draw 0"
    for path in (f"{linked}:{other}", str(tmp_path)):
        monkeypatch.setenv("PATH", path)
        assert replay_command("x", 0, 0) == command


@pytest.mark.usefixtures("no_command")
def test_a_replay_command_quotes_what_a_shell_would_read():
    command = replay_command("a$(b):C'.dense", 0, 0)
    assert shlex.split(command)[1:] == ["replay", "a$(b):C'.dense", "--draw", "0"]
