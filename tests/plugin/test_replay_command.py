"""The replay command that reports print, pasted into a shell where the gate was called."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from loragate.core.verdict import ExitCode, Verdict
from loragate.report.evidence import render_evidence

_ROOT = Path(__file__).parents[2]
_HERE = Path(__file__).parent / "misbehaving"
_SUBJECT = "mine:Moody"
_FILE = "my cases.yaml"


def _environment(subject_environment: dict[str, str]) -> dict[str, str]:
    """Without the folders of the tests: a subject is found in the current folder or not at all."""
    paths = os.pathsep.join(map(str, (_ROOT / "harness", _ROOT / "kernels")))
    return {**subject_environment, "PYTHONPATH": paths, "LORAGATE_PYTHON": sys.executable}


def _prepare(folder: Path) -> None:
    """The folder of a user: a subject, and cases of its own in a file whose name has a space."""
    folder.mkdir(exist_ok=True)
    shutil.copy(_HERE / "misbehaving_subject.py", folder)
    shutil.copy(_HERE / "replayed_subject.py", folder / "mine.py")
    shutil.copy(_HERE / "moody.yaml", folder / _FILE)


@pytest.fixture(scope="module")
def gate(run_once, session_of, subject_environment):
    """./ci/gate, called as a user calls it from a folder beside the checkout.

    It has one worker: a subject that remembers what it saw needs all repeats in one process.
    """

    def make(report):
        _prepare(report.parent / f"{report.name}_folder")
        folder = report.parent / f"{report.name}_folder"
        script = os.path.relpath(_ROOT / "ci" / "gate", folder)
        options = ["--seeds=2", "--repeats=2", f"--report={report}", f"--matrix={_FILE}"]
        done = subprocess.run(
            [script, "--subject", _SUBJECT, *options],
            cwd=folder,
            env=_environment(subject_environment) | {"PYTEST_XDIST_AUTO_NUM_WORKERS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=240,
        )
        return session_of(done, report)

    return run_once("moody", make)


@pytest.fixture(scope="module")
def folder(gate):
    return gate.report.parent / f"{gate.report.name}_folder"


@pytest.fixture
def paste(folder, subject_environment):
    """Runs a command line in the shell in which the gate was called."""

    def run(line):
        return subprocess.run(
            ["bash", "-c", line],
            cwd=folder,
            # LORAGATE_PYTHON was set for the call of the gate only
            env=_environment(subject_environment) | {"LORAGATE_PYTHON": ""},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=120,
        )

    return run


@pytest.mark.parametrize(("tokens", "trial"), [(25, (1, 0)), (26, (0, 1))], ids=["draw", "repeat"])
def test_a_printed_replay_command_gives_the_same_verdict_and_evidence(gate, paste, tokens, trial):
    assert gate.exit_code == ExitCode.WRONG, gate.output
    # above, and again for each draw
    printed, *_ = re.findall(rf"^ *replay  (.*\.tokens-{tokens} .*)$", gate.output, re.MULTILINE)
    (failed,) = [e for e in gate.finished if e.replay == printed and e.verdict is Verdict.FAIL]
    assert failed.trial == trial
    done = paste(printed)
    assert done.returncode == ExitCode.WRONG, done.stdout
    assert render_evidence(failed) in done.stdout


def test_every_report_and_event_holds_the_command_as_the_caller_can_paste_it(gate, folder):
    script = os.path.relpath(_ROOT / "ci" / "loragate", folder)
    start = f"LORAGATE_PYTHON={sys.executable} {script} replay {_SUBJECT}.dense_delta."
    end = f" --matrix '{folder / _FILE}'"
    events = [event for event in gate.log.events if hasattr(event, "replay")]
    # three cases, two draws, two repeats, each with a start and an end
    assert len(events) == 24
    assert all(event.replay.startswith(start) for event in events)
    assert all(event.replay.endswith(end) for event in events)
    wrong = {event.replay for event in events if " --draw 1 --matrix" in event.replay}
    junit = (gate.report / "junit.xml").read_text().replace("&#39;", "'").replace("&apos;", "'")
    assert any(command in junit for command in wrong)


@pytest.mark.parametrize(
    "arguments",
    [
        ["loragate.cli", "plan", f"--subject={_SUBJECT}", f"--matrix={_FILE}"],
        ["loragate.cli", "replay", f"{_SUBJECT}.tokens-27", f"--matrix={_FILE}"],
        ["loragate.cli", "replay", "--in-process", f"{_SUBJECT}.tokens-27", f"--matrix={_FILE}"],
        [
            *("pytest", "-n2", "-pno:cacheprovider", str(_ROOT / "cases")),
            *(f"--loragate-subject={_SUBJECT}", f"--loragate-matrix={_FILE}"),
        ],
    ],
    ids=["plan", "replay", "replay in process", "pytest"],
)
def test_a_subject_in_the_current_folder_is_found_by_console_scripts_too(
    arguments, tmp_path, subject_environment
):
    _prepare(tmp_path)
    (tmp_path / "bin").mkdir()
    # as pip writes them: the first place to look for modules is the folder of the script
    script = tmp_path / "bin" / "script.py"
    module, *arguments = arguments
    script.write_text(f"import sys\nfrom {module} import main\nsys.exit(main())\n")
    if module == "pytest":
        arguments.append(f"--loragate-report={tmp_path / 'report'}")
    done = subprocess.run(
        [sys.executable, script, *arguments],
        cwd=tmp_path,
        env=_environment(subject_environment),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
    )
    assert done.returncode == ExitCode.OK, done.stdout
