"""The command line: unknown words are answered with the nearest known one, and exit 4."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from loragate.cli import main
from loragate.core.verdict import ExitCode

MATRIX = f"--matrix={Path(__file__).parent / 'bad_day' / 'long_sleep.yaml'}"
GOOD = (
    "torch.dense_delta.dtype-fp32.exec-eager.in-32.layout-contiguous.mix-ragged.rank-8"
    ".ranks-mixed.slices-16.slots-4.tokens-21"
)


@pytest.mark.parametrize(
    ("arguments", "answer"),
    [
        (["gat"], "there is no 'gat'; known are"),
        (["gat"], "did you mean gate?"),
        (["plan", "--teir=smoke"], "unknown arguments: --teir=smoke; did you mean --tier?"),
        (["plan", "--tier=smke"], "did you mean smoke?"),
        (["gate", "--seeds=0"], "must be a number from 1 up (got '0')"),
        (["gate", "--seeds=2", "--attempt=1"], "not allowed with argument"),
        ([], "the following arguments are required: COMMAND"),
    ],
)
def test_a_wrong_word_is_a_usage_error_with_a_hint(arguments, answer, capsys):
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == ExitCode.USAGE
    assert answer in capsys.readouterr().err


def test_an_error_that_nobody_expected_is_told_in_a_line_and_is_no_wrong_result(
    capsys, monkeypatch
):
    def broken(arguments):
        raise RuntimeError("disk full\nand more")

    monkeypatch.setattr("loragate.commands.plan.run", broken)
    assert main(["plan"]) == ExitCode.INFRASTRUCTURE
    line, *stack = capsys.readouterr().err.splitlines()
    assert line == "loragate plan: RuntimeError: disk full"
    assert stack[0] == "Traceback (most recent call last):"
    assert any("in broken" in frame for frame in stack)


def test_parsing_imports_no_torch():
    text = "import sys; from loragate import cli; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", text], stdout=subprocess.PIPE, text=True)
    assert done.stdout == "False\n"


def test_the_plan_shows_what_would_run(capsys):
    assert main(["plan", "--subject=torch", "--tier=smoke", MATRIX]) == ExitCode.OK
    assert GOOD in capsys.readouterr().out


def test_a_pattern_that_selects_nothing_is_a_usage_error(capsys):
    arguments = ["plan", "--subject=torch", "--tier=smoke", "--cases=tokens-999", MATRIX]
    assert main(arguments) == ExitCode.USAGE
    assert "'tokens-999' selects none of 2 cases" in capsys.readouterr().err


def test_a_replay_prints_the_evidence_of_every_oracle(capsys):
    assert main(["replay", GOOD, "--attempt=2", MATRIX]) == ExitCode.OK
    output = capsys.readouterr().out
    assert f"PASS: {GOOD}" in output
    assert "reference  PASS" in output
    assert f"replay: loragate replay {GOOD} --attempt 2" in output


def test_a_replay_of_no_case_names_the_nearest(capsys):
    assert main(["replay", GOOD.replace("tokens-21", "tokens-23"), MATRIX]) == ExitCode.USAGE
    assert f"nearest: SUBJECT.{GOOD.removeprefix('torch.')}" in capsys.readouterr().err


def test_a_replay_with_an_unknown_subject_names_the_nearest(capsys):
    assert main(["replay", GOOD.replace("torch", "torhc", 1), MATRIX]) == ExitCode.USAGE
    assert "did you mean 'torch'?" in capsys.readouterr().err
