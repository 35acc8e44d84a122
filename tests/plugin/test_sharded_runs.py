"""Shards of the real gate and of pytest, and their merged report."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from loragate.cli import main
from loragate.core.verdict import ExitCode
from loragate.events.durations import durations_of
from loragate.events.log import read_events
from loragate.events.model import RunStarted
from loragate.matrix.case import Tier
from loragate.matrix.load import load_cases
from loragate.matrix.selection import Selection, select_runs
from loragate.matrix.shards import Shard
from loragate.run.folder import check_durations
from loragate.run.legs import GateSetup, legs_of, other_shards

MISBEHAVING = Path(__file__).parent / "misbehaving"
TORCH = "--subject=torch"


@pytest.fixture(scope="module")
def shards(run_once, run_gate):
    def gate(index):
        arguments = (TORCH, f"--shard={index}/2")
        few = {"PYTEST_XDIST_AUTO_NUM_WORKERS": "1"}
        return lambda report: run_gate(report, *arguments, matrix="four_good.yaml", **few)

    return [run_once(f"shard-{index}", gate(index)) for index in (1, 2)]


def test_shards_of_a_gate_run_each_case_once_and_merge_into_a_run_that_passed(shards, tmp_path):
    assert [shard.exit_code for shard in shards] == [ExitCode.OK] * 2, shards[0].output
    names = [{event.run_id for event in shard.finished} for shard in shards]
    assert [len(found) for found in names] == [2, 2]
    assert not names[0] & names[1]
    assert "2 cases of torch, shard 1/2" in shards[0].output
    merged = tmp_path / "merged"
    folders = [str(shard.report) for shard in shards]
    assert main(["merge", *folders, "--report", str(merged)]) == ExitCode.OK
    (plan,) = [e for e in read_events(merged / "events.jsonl").events if isinstance(e, RunStarted)]
    assert plan.legs == ("interpreter 1", "interpreter 2")
    assert sum(row.count for row in plan.expected) == 4
    # the merged report balances the next run
    assert durations_of(merged).cases.keys() == names[0] | names[1]


def test_a_gate_whose_other_shard_is_missing_is_incomplete(shards, tmp_path, capsys):
    merged = str(tmp_path / "merged")
    assert main(["merge", str(shards[0].report), "--report", merged]) == ExitCode.INCOMPLETE
    shown = capsys.readouterr().out
    assert "shard 2/2 is missing: no report of it was given" in shown
    assert "2 planned cases were never started" in shown


def test_the_shards_of_a_selection_hold_each_run_once_with_all_its_draws():
    matrix = (MISBEHAVING / "four_good.yaml",)
    cases = load_cases(matrix)
    whole = Selection(matrix=matrix, subjects=("torch",), tier=Tier.SMOKE, draws=(0, 1))
    parts = [
        select_runs(replace(whole, shard=Shard(index=index, count=3)), cases) for index in (1, 2, 3)
    ]
    assert [len(part) for part in parts] == [4, 2, 2]
    assert sorted(r.id for part in parts for r in part) == [r.id for r in select_runs(whole, cases)]


def setup_of(tmp_path, index, count):
    selection = Selection(
        matrix=(),
        subjects=("lorakernels",),
        tier=Tier.SMOKE,
        shard=Shard(index=index, count=count, of_gate=True),
    )
    return GateSetup(run="r", report=tmp_path, selection=selection, has_gpu=False)


def test_each_shard_runs_its_cases_and_one_of_them_runs_each_other_leg(tmp_path):
    setups = [setup_of(tmp_path, index, 2) for index in (1, 2)]
    names = [[leg.name for leg in legs_of(setup)] for setup in setups]
    assert names == [["interpreter", "compile"], ["interpreter", "host"]]
    assert "--loragate-shard=2/2" in legs_of(setups[1])[0].command
    (other,) = other_shards(setups[1])
    assert (other.index, other.legs) == (1, ("interpreter", "compile"))
    # what the leg of the other shard has to deliver
    assert [row.site for row in other.expected] == ["compile"]


def test_durations_in_the_folder_of_the_report_are_refused_before_it_is_cleared(tmp_path):
    for durations in (tmp_path, tmp_path / "events.jsonl"):
        with pytest.raises(ValueError, match="which is cleared"):
            check_durations(durations, tmp_path)
    check_durations(tmp_path / "previous" / "run", tmp_path)
    check_durations(None, tmp_path)
