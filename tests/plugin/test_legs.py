"""Which legs a run of the gate has, and the results that are expected of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from _pytest.config.argparsing import Parser

from loragate.compile_leg import BaselineError, expected_count
from loragate.core.verdict import Verdict
from loragate.events.durations import durations_of
from loragate.events.log import EventWriter
from loragate.events.model import COMPILE_SITE, CaseFinished, Expected, RunStarted
from loragate.matrix.case import Tier
from loragate.matrix.selection import Selection
from loragate.matrix.shards import Shard
from loragate.plugin import options
from loragate.run import legs
from loragate.run.legs import GateSetup, legs_of


def setup_of(*subjects: str, has_gpu: bool = False) -> GateSetup:
    selection = Selection(matrix=(), subjects=subjects, tier=Tier.SMOKE)
    return GateSetup(run="r", report=Path("report"), selection=selection, has_gpu=has_gpu)


@pytest.mark.parametrize(
    ("subjects", "names"),
    [
        (("torch",), ["interpreter"]),
        (("module:object",), ["interpreter"]),
        (("lorakernels", "torch"), ["interpreter", "compile", "host"]),
        (("vllm",), ["interpreter", "findings"]),
        (("vllm", "lorakernels"), ["interpreter", "compile", "host", "findings"]),
    ],
)
def test_a_subject_brings_the_legs_that_the_registry_declares(
    subjects: tuple[str, ...], names: list[str]
) -> None:
    assert [leg.name for leg in legs_of(setup_of(*subjects))] == names


def test_the_leg_of_the_cases_is_given_all_that_was_selected(tmp_path: Path) -> None:
    files = tuple(tmp_path / name for name in ("a.yaml", "b.yaml"))
    for file in files:
        file.touch()
    selection = Selection(
        matrix=files,
        subjects=("torch", "module:object"),
        tier=Tier.NIGHTLY,
        draws=(0, 3),
        repeats=2,
        patterns=("dense_delta.tokens-6", "*rank-8"),
        shard=Shard(index=2, count=3, durations=durations_of(_earlier(tmp_path)), of_gate=True),
    )
    setup = GateSetup(
        run="r",
        report=tmp_path / "report",
        selection=selection,
        has_gpu=False,
        durations=tmp_path / "events.jsonl",
    )
    parser = Parser(_ispytest=True)
    options.pytest_addoption(parser)
    given = [word for word in legs_of(setup)[0].command if word.startswith("--loragate-")]
    option = parser.parse_known_args(given)
    session = cast(pytest.Config, SimpleNamespace(option=option, rootpath=tmp_path))
    assert options.selection_of(session) == selection
    assert options.recorded_durations(session).cases == {"torch.a": 2.0}
    assert (option.loragate_run, Path(option.loragate_report)) == ("r", setup.report)


def _earlier(folder: Path) -> Path:
    """An earlier report, in which a case took two seconds."""
    plan = RunStarted(
        run="e", started_at="", tier=Tier.SMOKE, subjects=("torch",), legs=(), expected=()
    )
    end = CaseFinished(
        run_id="torch.a",
        subject="torch",
        site="dense_delta",
        draw=0,
        seed=1,
        worker="gw0",
        verdict=Verdict.PASS,
        judgements=(),
        duration_s=2.0,
        replay="",
    )
    with EventWriter(folder / "events.jsonl", run="e") as writer:
        writer.write(plan)
        writer.write(end)
    return folder / "events.jsonl"


def test_the_cases_run_on_a_gpu_where_there_is_one() -> None:
    assert [leg.name for leg in legs_of(setup_of("torch", has_gpu=True))] == ["gpu"]


def test_where_patterns_select_cases_no_leg_runs_that_has_none() -> None:
    setup = setup_of("vllm", "lorakernels")
    some = replace(setup, selection=replace(setup.selection, patterns=("dense_delta",)))
    assert [leg.name for leg in legs_of(some)] == ["interpreter"]


def test_speed_is_compared_last_and_only_where_it_was_asked_for() -> None:
    setup = replace(setup_of("lorakernels", has_gpu=True), speed_against="v1")
    names = ["gpu", "compile", "host", "speed-dense", "speed-moe"]
    assert [leg.name for leg in legs_of(setup)] == names
    some = replace(setup, selection=replace(setup.selection, patterns=("dense_delta",)))
    gpu, dense, moe = legs_of(some)
    assert dense.command[1:] == (
        *("-m", "loragate", "bench", "dense", "--against=v1"),
        *("--events=report/events.jsonl", "--run=r"),
    )
    assert (gpu.name, moe.name) == ("gpu", "speed-moe")


def test_only_the_compile_leg_has_expected_results_besides_cases() -> None:
    expected_results = {leg.name: leg.expected for leg in legs_of(setup_of("lorakernels"))}
    expected = Expected(
        leg="compile", subject="lorakernels", site=COMPILE_SITE, count=expected_count()
    )
    assert expected_results == {"interpreter": (), "compile": (expected,), "host": ()}


def test_without_a_readable_baseline_the_compile_leg_still_runs_and_reports_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def unreadable() -> int:
        raise BaselineError("resources.json: cannot be read")

    monkeypatch.setattr(legs, "expected_count", unreadable)
    expected_results = {leg.name: leg.expected for leg in legs_of(setup_of("lorakernels"))}
    assert expected_results["compile"] == ()
