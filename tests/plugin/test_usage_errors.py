"""A mistake in a selection ends every command in the same way, before it touches a report."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from loragate.core.verdict import ExitCode
from loragate.subjects.registry import SUBJECTS

_ROOT = Path(__file__).parents[2]
_GOOD = Path(__file__).parent / "misbehaving" / "four_good.yaml"
_GATE = ["loragate", "gate", "--subject=torch", "--cases={pattern}", "--matrix={matrix}"]
_PLAN = ["loragate", "plan", "--subject=torch", "--cases={pattern}", "--matrix={matrix}"]
_REPLAY = ["loragate", "replay", "torch.{pattern}", "--matrix={matrix}"]
_PYTEST = [
    *("pytest", "cases", "-pno:cacheprovider", "--loragate-subject=torch"),
    *("--loragate-cases={pattern}", "--loragate-matrix={matrix}"),
]
_COMMANDS = {
    "gate": _GATE,
    "plan": _PLAN,
    "replay": _REPLAY,
    "pytest": _PYTEST,
    "pytest -n 2": [*_PYTEST, "-n2"],
}


@pytest.fixture
def run(tmp_path, subject_environment, run_python):
    """Runs a command beside a report of an earlier run, which has to stay as it is."""
    report = tmp_path / "report"
    report.mkdir()
    (report / "events.jsonl").write_text("earlier")

    def call(command, pattern="dense_delta", matrix=_GOOD):
        arguments = [argument.format(pattern=pattern, matrix=matrix) for argument in command]
        option = {"gate": "--report", "cases": "--loragate-report"}.get(arguments[1])
        reported = [f"{option}={report}"] if option else []
        done = run_python("-m", *arguments, *reported, env=subject_environment)
        assert os.listdir(report) == ["events.jsonl"]
        assert (report / "events.jsonl").read_text() == "earlier"
        return done

    return call


@pytest.mark.drill(
    tried="A pattern that selects no case",
    exit_code=ExitCode.USAGE,
    kept="the earlier report; the nearest ids are named",
)
@pytest.mark.parametrize("command", _COMMANDS.values(), ids=_COMMANDS.keys())
def test_a_pattern_that_selects_nothing_names_the_nearest_ids_once(drill, run, command):
    done = run(command, pattern="dense_delta.tokns-22")
    drill(done.returncode, done.stdout)
    # a replay takes the cases of all registered subjects
    count = 4 * len(SUBJECTS) if "replay" in command else 4
    answer = f"selects none of {count} cases\n  nearest: torch.dense_delta."
    assert done.stdout.count(answer) == 1
    assert done.stdout.partition("nearest: ")[2].splitlines()[0].endswith(".tokens-22")


@pytest.mark.drill(
    tried="A case file that does not exist, is a folder, or is no text",
    exit_code=ExitCode.USAGE,
    kept="the earlier report; one line names the file",
)
@pytest.mark.parametrize(
    ("matrix", "answer"),
    [
        (_GOOD.with_name("four_god.yaml"), f"there is no such file; did you mean {_GOOD}?"),
        (Path(__file__).parent, "is a folder without YAML files"),
        (sys.executable, "is no YAML file"),
    ],
    ids=["missing", "folder", "binary"],
)
@pytest.mark.parametrize("command", [_PLAN, _REPLAY, _PYTEST], ids=["plan", "replay", "pytest"])
def test_a_case_file_that_cannot_be_read_is_named_in_one_line(drill, run, command, matrix, answer):
    done = run(command, matrix=matrix)
    drill(done.returncode, done.stdout)
    assert len(done.stdout.strip().splitlines()) == 1
    assert f"nothing was run: {matrix}" in done.stdout
    assert answer in done.stdout


@pytest.mark.drill(
    tried="A mistake in a case file, with workers of pytest",
    exit_code=ExitCode.USAGE,
    kept="the earlier report; file, line and field are named once",
)
def test_a_mistake_in_a_case_file_is_reported_once_under_pytest(drill, run, tmp_path):
    matrix = tmp_path / "mine.yaml"
    matrix.write_text(_GOOD.read_text().replace("rank: 8", "rank: 0"))
    done = run(_COMMANDS["pytest -n 2"], matrix=matrix)
    drill(done.returncode, done.stdout)
    assert done.stdout.count("defaults.rank: given 0") == 1


@pytest.mark.drill(
    tried="A subject that does not exist",
    exit_code=ExitCode.USAGE,
    kept="the earlier report; the nearest name is named",
)
@pytest.mark.parametrize(
    ("subject", "workers", "answer"),
    [
        (
            "torhc",
            [],
            "or `module:object`; did you mean 'torch'?",
        ),
        ("torhc", ["-n2"], "there is no subject 'torhc'; known are"),
        ("nowhere:X", ["-n2"], "no module 'nowhere' in the current folder or in PYTHONPATH"),
        ("misbehaving_subject:X", ["-n2"], "misbehaving_subject has no 'X'"),
    ],
)
def test_an_unknown_subject_is_named_once_under_pytest(drill, run, workers, subject, answer):
    command = ["pytest", "cases", "-pno:cacheprovider", f"--loragate-subject={subject}"]
    done = run([*command, "--loragate-matrix={matrix}", *workers])
    drill(done.returncode, done.stdout)
    assert done.stdout.count(answer) == 1


def test_ordinary_tests_do_not_wait_for_the_cases(run, tmp_path):
    (tmp_path / "test_ordinary.py").write_text("def test_nothing(): pass\n")
    bad = {"--rootdir": _ROOT, "-c": _ROOT / "pyproject.toml"}
    options = [f"{name}={value}" for name, value in bad.items()]
    done = run(["pytest", str(tmp_path), "-pno:cacheprovider", *options])
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("workers", ["-n0", "-n1"])
def test_a_run_that_nobody_has_started_cannot_be_joined(run, workers):
    done = run([*_PYTEST, "--loragate-run=nobody", workers])
    assert done.returncode == ExitCode.USAGE, done.stdout
    assert "has no plan of a run 'nobody' to append to" in done.stdout
