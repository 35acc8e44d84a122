"""The leg of the gate that runs the tests of what lorakernels does on the host."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from loragate.core.verdict import ExitCode
from loragate.events.log import read_events
from loragate.events.model import Note
from loragate.matrix.case import Tier
from loragate.matrix.selection import Selection
from loragate.run import legs
from loragate.subjects import SUBJECTS

ROOT = Path(__file__).parents[2]
GOOD = "def test_a(): pass\ndef test_b(): pass\n"
NOT_HERE = "import pytest\npytest.importorskip('peft_of_tomorrow')\ndef test_c(): pass\n"
NOT_MEANT = "import pytest\n@pytest.mark.skip(reason='from Triton 9 on')\ndef test_d(): pass\n"
MISSING = "could not import 'peft_of_tomorrow': No module named 'peft_of_tomorrow'"


def test_every_folder_of_tests_that_run_in_the_interpreter_is_run() -> None:
    switch = 'os.environ["TRITON_INTERPRET"] = "1"'
    found = [path.parent for path in ROOT.glob("tests/*/conftest.py") if switch in path.read_text()]
    assert {str(folder.relative_to(ROOT)) for folder in found} == set(
        SUBJECTS["lorakernels"].host_tests
    )


@pytest.mark.parametrize(
    ("other", "exit_code", "note"),
    [
        (GOOD, ExitCode.OK, "host tests: 4 executed, 0 skipped"),
        (NOT_MEANT, ExitCode.OK, "host tests: 2 executed, 1 skipped: from Triton 9 on (1)"),
        (NOT_HERE, ExitCode.INCOMPLETE, f"host tests: 2 executed, 1 skipped: {MISSING} (1)"),
        ("def test_e(): assert False\n", ExitCode.WRONG, "host tests: 3 executed, 0 skipped"),
    ],
)
def test_a_leg_records_what_it_skipped_and_is_incomplete_if_a_package_is_missing(
    tmp_path, subject_environment, monkeypatch, other, exit_code, note
):
    (tmp_path / "test_good.py").write_text(GOOD)
    (tmp_path / "test_other.py").write_text(other)
    (tmp_path / "conftest.py").write_text('pytest_plugins = ["loragate.plugin"]\n')
    (tmp_path / "pyproject.toml").write_text(
        '[tool.pytest.ini_options]\naddopts = ["--import-mode=importlib"]\n'
    )
    subject = replace(SUBJECTS["lorakernels"], host_tests=("test_good.py", "test_other.py"))
    monkeypatch.setattr(legs, "SUBJECTS", {"lorakernels": subject})
    monkeypatch.setattr(legs, "project_root", lambda: tmp_path)
    selection = Selection(matrix=(), subjects=("lorakernels",), tier=Tier.SMOKE)
    report = tmp_path / "report"
    setup = legs.GateSetup(run="r", report=report, selection=selection, has_gpu=False)
    (command,) = [leg.command for leg in legs.legs_of(setup) if leg.name == "host"]
    done = subprocess.run(
        [*command, "--numprocesses=1"],
        cwd=tmp_path,
        env=subject_environment,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert done.returncode == exit_code, done.stdout
    assert read_events(report / "events.jsonl").events == (Note(text=note),)
