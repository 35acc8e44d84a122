"""The files of continuous integration that people copy: valid, and true to the commands."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from loragate.cli import main

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
        with pytest.raises(SystemExit) as ended:
            main([command, "--help"])
        shown = capsys.readouterr().out
        assert ended.value.code == 0, f"{command} is no command"
        known = set(OPTION.findall(shown))
        given = {option for name, option in used if name == command}
        # those of other programs within the arguments
        assert given - known - {"--before"} == set()
