"""The leg of the gate that runs the tests of what lorakernels does on the host."""

from __future__ import annotations

import ast
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import pytest

from loragate.core.verdict import ExitCode, Verdict
from loragate.events.log import EventWriter, read_events
from loragate.events.model import (
    HostTestFinished,
    HostTestsCollected,
    LegFinished,
    LegStarted,
    Note,
    RunFinished,
    RunStarted,
)
from loragate.matrix.case import Tier
from loragate.matrix.selection import Selection
from loragate.report.summary import Summary
from loragate.report.terminal import Colour, render_summary
from loragate.report.write import write_report
from loragate.run import legs
from loragate.subjects import SUBJECTS

ROOT = Path(__file__).parents[2]
RUN = "r"
GOOD = "def test_a(): pass\ndef test_b(): pass\n"
NOT_HERE = "import pytest\npytest.importorskip('peft_of_tomorrow')\ndef test_c(): pass\n"
NOT_MEANT = "import pytest\n@pytest.mark.skip(reason='from Triton 9 on')\ndef test_d(): pass\n"
TOO_OLD = "import pytest\npytest.importorskip('pluggy', minversion='999')\ndef test_e(): pass\n"
MISSING = "could not import 'peft_of_tomorrow': No module named 'peft_of_tomorrow'"
FAILING = """
import pytest

def test_table():
    print("::set-output name=x::said by the test")
    assert 1 + 1 == 3, "no such sum\\n::error::no such sum"

@pytest.fixture
def table():
    yield
    raise ValueError("not closed")

def test_closing(table): pass
def test_opening(nothing): pass
def test_skipped(): pytest.skip("from Triton 9 on")
def test_known(): pytest.xfail("not yet")
def test_good(): print("said by a good test")
"""
DEADLY = "import os\ndef test_x(): os._exit(7)\ndef test_y(): pass\n"
HANGING = "import time\ndef test_x(): time.sleep(300)\ndef test_y(): pass\n"
SHORT_DEADLINE = (
    "import pytest\n@pytest.hookimpl(tryfirst=True)\ndef pytest_runtestloop():\n"
    "    from loragate.plugin import host_tests\n    host_tests.DEADLINE_S = 0.5\n"
)

KNOWN_WITHOUT_A_RUN = (
    "import pytest\n@pytest.mark.xfail(run=False, reason='ends the process')\ndef test_x(): pass\n"
)
ONLY_SET_UP = "def pytest_configure(config): config.option.setuponly = True\n"

Leg = Callable[..., "Ended"]


class Ended:
    """A host leg that has ended in a run with no other leg, and the report of that run."""

    def __init__(self, exit_code: int, output: str, report: Path) -> None:
        self.exit_code = exit_code
        self.output = output
        self.report = report
        self.events = read_events(report / "events.jsonl").events
        self.found = {e.test: e for e in self.events if isinstance(e, HostTestFinished)}

    def close(self) -> Summary:
        """As the gate closes the run."""
        verdict = legs.verdict_of_exit(self.exit_code)
        leg = LegFinished(name="host", verdict=verdict, exit_code=self.exit_code, duration_s=1.0)
        with EventWriter(self.report / "events.jsonl", run=RUN) as writer:
            for event in (leg, RunFinished(finished_at="", duration_s=1.0)):
                writer.write(event)
        return write_report(self.report / "events.jsonl", self.report)

    def junit(self) -> dict[str, ElementTree.Element]:
        """What junit.xml holds of each test, and nothing else than tests of the leg."""
        root = ElementTree.parse(self.report / "junit.xml").getroot()
        return {str(case.get("name")): case for case in root.iterfind("testsuite[@name='host']/*")}


@pytest.fixture
def run_leg(tmp_path, subject_environment, monkeypatch) -> Leg:
    """Runs the leg as the gate does, on files of tests."""

    def run(conftest: str = "", workers: int = 1, **files: str) -> Ended:
        for name, text in files.items():
            (tmp_path / f"{name}.py").write_text(text)
        plugins = 'pytest_plugins = ["loragate.plugin"]\n'
        (tmp_path / "conftest.py").write_text(plugins + conftest)
        (tmp_path / "pyproject.toml").write_text(
            '[tool.pytest.ini_options]\naddopts = ["--import-mode=importlib"]\n'
        )
        paths = tuple(f"{name}.py" for name in files)
        subject = replace(SUBJECTS["lorakernels"], host_tests=paths)
        monkeypatch.setattr(legs, "SUBJECTS", {"lorakernels": subject})
        monkeypatch.setattr(legs, "data_root", lambda: tmp_path)
        selection = Selection(matrix=(), subjects=("lorakernels",), tier=Tier.SMOKE)
        report = tmp_path / "report"
        setup = legs.GateSetup(run=RUN, report=report, selection=selection, has_gpu=False)
        (command,) = [leg.command for leg in legs.legs_of(setup) if leg.name == "host"]
        _open_run(report)
        done = subprocess.run(
            [*command, f"--numprocesses={workers}"],
            cwd=tmp_path,
            env=subject_environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=240,
        )
        return Ended(done.returncode, done.stdout, report)

    return run


def _open_run(report: Path) -> None:
    plan = RunStarted(
        run=RUN,
        started_at="2026-11-21T04:15:30+00:00",
        tier=Tier.SMOKE,
        subjects=("lorakernels",),
        legs=("host",),
        expected=(),
    )
    with EventWriter(report / "events.jsonl", run=RUN) as writer:
        for event in (plan, LegStarted(name="host")):
            writer.write(event)


def test_tests_that_were_set_up_and_not_called_have_judged_nothing(run_leg):
    leg = run_leg(conftest=ONLY_SET_UP, test_good=GOOD, test_known=KNOWN_WITHOUT_A_RUN)
    assert leg.exit_code == ExitCode.INCOMPLETE, leg.output
    assert {test: (e.verdict, e.message) for test, e in leg.found.items()} == {
        "test_good.py::test_a": (Verdict.INCONCLUSIVE, "was set up and never called"),
        "test_good.py::test_b": (Verdict.INCONCLUSIVE, "was set up and never called"),
        # it says itself that it is not called
        "test_known.py::test_x": (Verdict.PASS, ""),
    }
    assert leg.close().exit_code is ExitCode.INCOMPLETE


def test_every_folder_of_tests_that_run_in_the_interpreter_is_run() -> None:
    switch = 'os.environ["TRITON_INTERPRET"] = "1"'
    found = [
        path.parent for path in ROOT.glob("tests/**/conftest.py") if switch in path.read_text()
    ]
    assert {str(folder.relative_to(ROOT)) for folder in found} == set(
        SUBJECTS["lorakernels"].host_tests
    )


def test_no_host_test_hides_behind_a_reason_of_its_own_that_a_package_is_missing():
    folders = [ROOT / path for path in SUBJECTS["lorakernels"].host_tests]
    files = [file for folder in folders for file in folder.rglob("*.py")]
    calls = [
        (file.name, call.lineno)
        for file in files
        for call in ast.walk(ast.parse(file.read_text()))
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "pytest.importorskip"
        if any(keyword.arg == "reason" for keyword in call.keywords)
    ]
    assert calls == []


@pytest.mark.parametrize(
    ("other", "exit_code", "note", "verdicts"),
    [
        (NOT_MEANT, ExitCode.OK, "2 executed, 1 skipped: from Triton 9 on (1)", {"skip": 1}),
        (
            NOT_HERE,
            ExitCode.INCOMPLETE,
            f"2 executed, 1 skipped: {MISSING} (1)",
            {"inconclusive": 1},
        ),
        (
            TOO_OLD,
            ExitCode.INCOMPLETE,
            f"2 executed, 1 skipped: module 'pluggy' has __version__ {version('pluggy')!r}, "
            "required is: '999' (1)",
            {"inconclusive": 1},
        ),
    ],
)
def test_a_leg_records_what_it_skipped_and_is_incomplete_if_a_package_is_missing(
    run_leg: Leg, other, exit_code, note, verdicts
):
    leg = run_leg(test_good=GOOD, test_other=other)
    assert leg.exit_code == exit_code, leg.output
    assert Note(text=f"host tests: {note}") in leg.events
    found = [test.verdict for test in leg.found.values()]
    assert {v: found.count(v) for v in found} == {Verdict.PASS: 2, **verdicts}
    (skipped,) = [test for test in leg.found.values() if test.verdict is not Verdict.PASS]
    assert skipped.message in note


def test_a_leg_whose_every_test_is_skipped_has_judged_nothing(run_leg: Leg):
    leg = run_leg(workers=0, test_other=NOT_MEANT)
    assert leg.exit_code == ExitCode.INCOMPLETE, leg.output
    assert leg.close().exit_code is ExitCode.INCOMPLETE


@pytest.mark.drill(
    tried="A host test that fails",
    exit_code=ExitCode.WRONG,
    kept="its name, its file and line, the error and the command in every page",
)
def test_a_host_test_that_fails_has_a_name_in_every_report(drill, run_leg: Leg):
    leg = run_leg(test_fails=FAILING, test_broken="import nothing_like_this\n")
    summary = leg.close()
    text = render_summary(summary, Colour.OFF)
    drill(leg.exit_code, text)
    # every test has ended once: the good ones, the bad ones, and the module that has no tests
    collected = {t for e in leg.events if isinstance(e, HostTestsCollected) for t in e.tests}
    assert leg.found.keys() == {*collected, "test_broken.py"}
    bad = {
        "test_fails.py::test_table": "AssertionError: no such sum",
        "test_fails.py::test_closing": "error in teardown: ValueError: not closed",
        "test_fails.py::test_opening": "error in setup: fixture 'nothing' not found",
        "test_broken.py": "error in collection: ModuleNotFoundError: No module named "
        "'nothing_like_this'",
    }
    assert {test.test: test.message for test in summary.bad_host_tests} == bad
    assert (
        "FAIL  test_fails.py::test_table\n  AssertionError: no such sum\n  at test_fails.py:6\n"
        f"  rerun  {sys.executable} -m pytest test_fails.py::test_table\n"
    ) in text
    # good ones are counted only
    assert "test_good" not in text
    assert "note: host tests: 7 executed, 1 skipped" in text
    page = (leg.report / "index.html").read_text()
    cases = leg.junit()
    for test in bad:
        assert f"<b>{test}</b>" in page
        assert cases[test].find("failure") is not None
    table = cases["test_fails.py::test_table"]
    failure = table.find("failure")
    assert failure.get("message") == "AssertionError: no such sum; at test_fails.py:6"
    assert "assert (1 + 1) == 3" in failure.text
    assert "said by the test" in table.findtext("system-out")
    assert cases["test_fails.py::test_skipped"].find("skipped") is not None
    good = [test for test, case in cases.items() if case.find("failure") is case.find("skipped")]
    assert sorted(good) == ["test_fails.py::test_good", "test_fails.py::test_known"]


@pytest.mark.drill(
    tried="A host test that kills its worker",
    exit_code=ExitCode.WRONG,
    kept="its name and how it ended; the tests after it run in a new worker",
)
def test_a_host_test_that_kills_its_worker_is_named_and_costs_no_other_test(drill, run_leg: Leg):
    leg = run_leg(test_a=DEADLY)
    drill(leg.exit_code, leg.output)
    _check_ended_worker(leg, "worker gw0 died")


@pytest.mark.drill(
    tried="A host test that hangs",
    exit_code=ExitCode.WRONG,
    kept="its name and the stacks; the tests after it run in a new worker",
)
def test_a_host_test_that_hangs_is_named_with_its_stack_and_costs_no_other_test(
    drill, run_leg: Leg
):
    leg = run_leg(SHORT_DEADLINE, test_a=HANGING)
    drill(leg.exit_code, leg.output)
    _check_ended_worker(leg, "no end within 0.5 s")
    assert 'test_a.py", line 2 in test_x' in leg.found["test_a.py::test_x"].detail
    # apart from the stacks of workers that run cases beside it
    stacks = [path.relative_to(leg.report) for path in leg.report.glob("workers/**/*.stack")]
    assert stacks
    assert {path.parent for path in stacks} == {Path("workers/host")}


def _check_ended_worker(leg: Ended, message: str) -> None:
    leg.close()
    ended = leg.found["test_a.py::test_x"]
    assert (ended.verdict, ended.message) == (Verdict.FAIL, message)
    assert leg.found["test_a.py::test_y"].verdict is Verdict.PASS
    failure = leg.junit()["test_a.py::test_x"].find("failure")
    assert failure is not None
    assert failure.get("message", "").startswith(message)


def test_a_host_test_that_was_collected_and_never_ended_is_inconclusive_by_name(run_leg: Leg):
    stop = "def pytest_runtest_teardown(item): item.session.shouldstop = 'enough'\n"
    leg = run_leg(stop, workers=0, test_a=GOOD)
    assert leg.exit_code == ExitCode.INCOMPLETE, leg.output
    (lost,) = leg.close().bad_host_tests
    assert (lost.test, lost.message) == ("test_a.py::test_b", "collected, but never ended")
    assert leg.junit()["test_a.py::test_b"].find("error") is not None
