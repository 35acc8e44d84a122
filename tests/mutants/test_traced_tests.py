"""Host tests of sound code, each in a fork that notes what it reaches."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from loragate.core.verdict import Verdict
from loragate.mutants import child
from loragate.mutants.units import read_transcript

TESTS = """
import os

def test_passes():
    pass

def test_crashes():
    os.abort()

def test_fails():
    assert False
"""
# in a process of its own, because a session of pytest changes the process that it runs in
SCRIPT = """
import sys
from pathlib import Path
from loragate.mutants.host_tests import TracedTests, ended_well, run_tests
from loragate.mutants.units import Transcript

root = Path(sys.argv[1])
plugin = TracedTests(Transcript(root / "transcript.jsonl"), root, lambda name: "trace")
code = run_tests([root / "test_three.py"], root, plugin)
print("went to its end" if ended_well(code) else f"broke off with {int(code)}")
"""


def trace(folder: Path, text: str) -> str:
    """What the session of a module with this text says of its end."""
    (folder / "test_three.py").write_text(text, encoding="utf-8")
    (folder / "pyproject.toml").write_text("", encoding="utf-8")
    ended = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(folder)],
        capture_output=True,
        encoding="utf-8",
        timeout=120,
        check=True,
    )
    return ended.stdout.splitlines()[-1]


def test_a_test_whose_process_dies_is_not_lost(tmp_path: Path) -> None:
    assert trace(tmp_path, TESTS) == "went to its end"
    ended = read_transcript(tmp_path / "transcript.jsonl").ended
    assert {entry.unit.rpartition("::")[2]: entry.verdict for entry in ended} == {
        "test_passes": Verdict.PASS,
        "test_crashes": Verdict.INFRA,
        "test_fails": Verdict.FAIL,
    }


def test_a_module_that_is_skipped_as_a_whole_breaks_nothing_off(tmp_path: Path) -> None:
    skipped = "import pytest\npytest.importorskip('no_such_library')\n"
    assert trace(tmp_path, skipped) == "went to its end"


def test_a_module_that_cannot_be_collected_breaks_its_session_off(tmp_path: Path) -> None:
    assert trace(tmp_path, "import no_such_library") == "broke off with 2"


def test_a_module_that_needs_a_library_which_is_not_there_is_not_traced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "needs_an_extra.py").write_text("import no_such_library\n")
    (tmp_path / "needs_a_part.py").write_text("import lorakernels.no_such_part\n")
    monkeypatch.syspath_prepend(tmp_path)
    child._import_module("needs_an_extra")
    with pytest.raises(ModuleNotFoundError, match="no_such_part"):
        child._import_module("needs_a_part")
