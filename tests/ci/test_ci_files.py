"""The files of continuous integration that people copy: valid, and true to the commands."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from datetime import date
from pathlib import Path

import pytest
import yaml

from loragate.cli import main
from loragate.history import Outcome, Purpose, ScanRun, TrialRecord
from loragate.nightly.morning import morning
from loragate.nightly.pages.summary import render_markdown

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
EXAMPLES = sorted((ROOT / "ci" / "examples").glob("*.yml"))
SCHEMAS = {
    ".github/workflows/premerge.yml": "vendor.github-workflows",
    ".github/workflows/nightly.yml": "vendor.github-workflows",
    ".github/actions/cpu-environment/action.yml": "vendor.github-actions",
    "ci/examples/buildkite.yml": "vendor.buildkite",
    "ci/examples/gitlab-ci.yml": "vendor.gitlab-ci",
}
# of loragate; the other commands of ci/ take no arguments
COMMAND = re.compile(r"\./ci/(gate|loragate (\w+))(.*)")
OPTION = re.compile(r"--[a-z-]+")


def tool(name: str) -> str:
    """A program that the extra `test` installs beside this Python."""
    found = shutil.which(name, path=str(Path(sys.executable).parent))
    if found is None:
        pytest.skip(f"{name} is not installed; install the extra loragate[test]")
    return found


def run(*command: str) -> str:
    """What a program says against a file, "" if nothing."""
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    return "" if done.returncode == 0 else done.stdout + done.stderr


def test_the_workflows_are_valid_for_actionlint() -> None:
    assert run(tool("actionlint"), *map(str, WORKFLOWS)) == ""


def test_actionlint_would_refuse_a_workflow_with_a_mistake(tmp_path: Path) -> None:
    text = WORKFLOWS[0].read_text().replace("runs-on: ubuntu-24.04", "runs-on: ubuntu-24.40")
    (tmp_path / "wrong.yml").write_text(text)
    assert "ubuntu-24.40" in run(tool("actionlint"), str(tmp_path / "wrong.yml"))


@pytest.mark.parametrize("file", SCHEMAS)
def test_each_file_fits_the_schema_of_its_system(file: str) -> None:
    pytest.importorskip("check_jsonschema", reason="install the extra loragate[test]")
    transform = ("--data-transform", "gitlab-ci") if "gitlab" in SCHEMAS[file] else ()
    arguments = ("--builtin-schema", SCHEMAS[file], *transform, file)
    assert run(sys.executable, "-m", "check_jsonschema", *arguments) == ""


def test_every_file_is_checked() -> None:
    actions = (ROOT / ".github" / "actions").glob("*/action.yml")
    found = {str(path.relative_to(ROOT)) for path in (*WORKFLOWS, *EXAMPLES, *actions)}
    assert found == set(SCHEMAS)


@pytest.mark.parametrize("path", [*WORKFLOWS, *EXAMPLES], ids=lambda path: path.name)
def test_the_commands_and_their_options_exist(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # a command may go on in the next line
    text = path.read_text().replace("\\\n", " ")
    used = {
        (m[2] or m[1], option) for m in COMMAND.finditer(text) for option in OPTION.findall(m[3])
    }
    for command in {command for command, _ in used}:
        # some options are those of an action
        for words in ([command], [command, "prune"]) if command == "history" else ([command],):
            with pytest.raises(SystemExit) as ended:
                main([*words, "--help"])
            assert ended.value.code == 0, f"{command} is no command"
        known = set(OPTION.findall(capsys.readouterr().out))
        given = {option for name, option in used if name == command}
        assert given - known == set()


NIGHTLY = [ROOT / ".github" / "workflows" / "nightly.yml", *EXAMPLES]


def script(path: Path) -> str:
    """What the nightly job of a file runs, as a shell reads it."""
    loaded = yaml.safe_load(path.read_text())
    if path.name == "nightly.yml":
        return "\n".join(step.get("run", "") for step in loaded["jobs"]["scan"]["steps"])
    if path.name == "buildkite.yml":
        (step,) = [step for step in loaded["steps"] if step["label"] == "nightly"]
        return str(step["command"]).replace("$$", "$")
    return "\n".join([*loaded["nightly"]["script"], *loaded["nightly"]["after_script"]])


@pytest.fixture
def job(tmp_path: Path) -> Callable[..., tuple[int, list[str]]]:
    """Runs the nightly job of a file in a repository of its own, and returns its exit code and the
    commands of loragate that it gave, each with the folder of compiled kernels."""
    fake = f"""#!/bin/sh
        printf '%s CACHE=%s\\n' "$*" "$TRITON_CACHE_DIR" >> {tmp_path}/given
        mkdir -p report; [ "$1" != scan ] || echo PAGE > report/morning.md
        [ "$1" != scan ] || exit $SCAN"""
    agent = f"""#!/bin/sh
        printf '%s %s\\n' "$*" "$(cat)" >> {tmp_path}/annotated"""
    for name, text in {"repository/ci/loragate": fake, "bin/buildkite-agent": agent}.items():
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    (tmp_path / "repository" / "kernels").mkdir()
    (tmp_path / "repository" / "kernels" / "a.py").touch()

    def run_job(path: Path, *, age: str, code: int = 0) -> tuple[int, list[str]]:
        environ = {
            "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
            "HOME": str(tmp_path),
            "SCAN": str(code),
            "BUDGET": "1h",
            "HISTORY": "h.db",
            "TRITON_CACHE_DIR": "of-job",
            "RUNNER_TOOL_CACHE": str(tmp_path),
            "KERNELS": "abc",
            "GITHUB_ENV": str(tmp_path / "env"),
            "GITHUB_OUTPUT": str(tmp_path / "output"),
            **{f"GIT_{who}_{what}": "a@b" for who in ("AUTHOR", "COMMITTER") for what in _WHO},
            **dict.fromkeys(("GIT_AUTHOR_DATE", "GIT_COMMITTER_DATE"), age),
        }
        commit = "git init -q . && git add . && git commit -qm first"
        repository = tmp_path / "repository"
        subprocess.run(commit, shell=True, cwd=repository, env=environ, check=True)
        done = subprocess.run(
            ["bash", "-e", "-c", script(path)], cwd=repository, env=environ, check=False
        )
        return done.returncode, (tmp_path / "given").read_text().splitlines()

    return run_job


_WHO = ("NAME", "EMAIL")


@pytest.mark.parametrize("path", NIGHTLY, ids=lambda path: path.name)
def test_a_night_scans_what_changed_with_a_cache_of_its_own_and_prunes(
    path: Path, job: Callable[..., tuple[int, list[str]]], tmp_path: Path
) -> None:
    code, (scan, prune) = job(path, age="2020-01-01T00:00:00Z")
    assert code == 0
    assert re.search(r"--since [0-9a-f]{40} ", scan)
    assert "prune --days 90" in prune
    made = (tmp_path / "env").read_text() if path.name == "nightly.yml" else scan
    assert re.search(r"CACHE(_DIR)?=\S+/loragate-triton/\w+", made)


@pytest.mark.parametrize("path", NIGHTLY, ids=lambda path: path.name)
def test_a_repository_of_today_is_scanned_without_since(
    path: Path, job: Callable[..., tuple[int, list[str]]]
) -> None:
    code, (scan, _) = job(path, age="")
    assert code == 0
    assert "--since" not in scan


def test_buildkite_shows_the_page_of_a_scan_that_failed_and_prunes_after_it(
    job: Callable[..., tuple[int, list[str]]], tmp_path: Path
) -> None:
    code, (_, prune) = job(ROOT / "ci" / "examples" / "buildkite.yml", age="", code=2)
    assert (code, "prune" in prune) == (2, True)
    assert (tmp_path / "annotated").read_text() == "annotate --context nightly --style error PAGE\n"


@pytest.mark.parametrize(
    ("findings", "is_told"),
    [
        ([], False),
        ([{"is_new": True}], True),
        ([{"is_new": False}], False),
        ([{"is_new": False}, {"is_new": True}], True),
        ([{"is_new": True, "is_held": True}], False),
    ],
)
def test_an_issue_is_opened_for_what_is_new_and_not_in_quarantine(
    findings: list[dict[str, bool]], is_told: bool, tmp_path: Path
) -> None:
    run = ScanRun(uid="r", machine="m", started_at=1e9)
    of = TrialRecord(
        run="r",
        number=0,
        at=1e9,
        case="a",
        subject="a",
        site="a",
        path="a: b, new: c",
        path_key="k",
        grouped="g",
        device="cpu",
        draw=0,
        measure="bits",
        purpose=Purpose.PLANNED,
        outcome=Outcome.DIFFERENT,
    )
    trials = [replace(of, number=k, place=k) for k in range(5)]
    page = morning([run], trials, today=date(2026, 1, 1))
    (finding,) = page.findings
    shown = replace(page, findings=tuple(replace(finding, **each) for each in findings))
    (tmp_path / "report").mkdir()
    (tmp_path / "report" / "morning.md").write_text(render_markdown(shown))
    steps = yaml.safe_load(NIGHTLY[0].read_text())["jobs"]["scan"]["steps"]
    (step,) = [step for step in steps if step.get("id") == "page"]
    environ = {**os.environ, "GITHUB_OUTPUT": str(tmp_path / "output")}
    (tmp_path / "output").touch()
    subprocess.run(["bash", "-e", "-c", step["run"]], cwd=tmp_path, env=environ, check=True)
    assert (tmp_path / "output").read_text() == ("new=true\n" if is_told else "")
