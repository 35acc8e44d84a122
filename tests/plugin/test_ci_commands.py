"""The shell commands: which Python they take, and when they make their environment."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from loragate.core.verdict import ExitCode

ROOT = Path(__file__).parents[2]
TOOLS = ("bash", "cat", "cksum", "dirname", "mkdir", "cp")

# a Python that is new enough, makes environments out of itself, and writes down what it is asked
FAKE_PYTHON = """#!/bin/bash
echo "$@" >> "$CALLS"
if [ "$2" = loragate ]; then echo "$0 $LORAGATE_COMMAND"; fi
if [ "$1 $2" = "-m venv" ]; then mkdir -p "$4/bin" && cp "$0" "$4/bin/python"; fi
"""


@pytest.fixture
def checkout(tmp_path):
    """A checkout without an environment, and a PATH with nothing but what every system has."""
    shutil.copytree(ROOT / "ci", tmp_path / "checkout" / "ci")
    shutil.copy(ROOT / "pyproject.toml", tmp_path / "checkout")
    (tmp_path / "bin").mkdir()
    for tool in TOOLS:
        found = shutil.which(tool)
        assert found is not None
        (tmp_path / "bin" / tool).symlink_to(found)
    return tmp_path / "checkout"


def gate(checkout: Path, *arguments: str, **changes: str) -> subprocess.CompletedProcess[str]:
    return call(str(checkout / "ci" / "gate"), checkout, *arguments, **changes)


def call(
    script: str, checkout: Path, *arguments: str, folder: Path = Path("/"), **changes: str
) -> subprocess.CompletedProcess[str]:
    calls = checkout.parent / "calls"
    environ = {"PATH": str(checkout.parent / "bin"), "CALLS": str(calls), **changes}
    return subprocess.run(
        [script, *arguments],
        cwd=folder,
        env=environ,
        capture_output=True,
        text=True,
    )


def install(checkout: Path, name: str, text: str) -> None:
    program = checkout.parent / "bin" / name
    program.write_text(text)
    program.chmod(0o755)


def install_python(checkout: Path, text: str) -> None:
    install(checkout, "python3", text)


def calls(checkout: Path) -> str:
    return (checkout.parent / "calls").read_text()


def test_a_machine_without_a_new_enough_python_is_refused(checkout):
    install_python(checkout, "#!/bin/bash\nexit 1\n")
    done = gate(checkout)
    assert done.returncode == ExitCode.INFRASTRUCTURE
    assert "No Python >= 3.11 found on PATH" in done.stderr


def test_the_environment_is_made_on_first_use_only(checkout):
    install_python(checkout, FAKE_PYTHON)
    first = gate(checkout, "--seeds=2")
    assert first.returncode == 0, first.stderr
    assert "preparing .venv with python3" in first.stderr
    again = gate(checkout, "--seeds=3")
    assert again.stderr == ""
    assert calls(checkout).count("-m venv") == 1
    assert calls(checkout).count("-m pip install") == 1
    assert "-m loragate gate --seeds=2\n" in calls(checkout)
    assert calls(checkout).endswith("-m loragate gate --seeds=3\n")


def test_a_changed_pin_is_installed_into_the_environment(checkout):
    install_python(checkout, FAKE_PYTHON)
    gate(checkout)
    with (checkout / "ci" / "constraints.txt").open("a") as file:
        file.write("another==1.0\n")
    gate(checkout)
    assert calls(checkout).count("-m pip install") == 2


@pytest.mark.parametrize("asked", [("--subject", "vllm"), ("--subject=vllm",)])
def test_vllm_is_installed_only_on_request_into_an_environment_of_its_own(checkout, asked):
    install_python(checkout, FAKE_PYTHON)
    gate(checkout)
    assert "-e .[test]\n" in calls(checkout)
    install(checkout, "nvidia-smi", "#!/bin/bash\nexit 0\n")
    gate(checkout, *asked)
    assert (checkout / ".venv-vllm" / "bin" / "python").exists()
    assert "-e .[test,vllm]" in calls(checkout)
    assert "--no-deps" not in calls(checkout)


def test_without_a_gpu_vllm_is_installed_beside_the_torch_of_the_project(checkout):
    install_python(checkout, FAKE_PYTHON)
    install(checkout, "nvidia-smi", "#!/bin/bash\nexit 9\n")
    packages = checkout / "ci" / "vllm-without-gpu.txt"
    # the same release as with a GPU
    pins = (checkout / "ci" / "constraints-vllm.txt").read_text().splitlines()
    assert any(pin.startswith("vllm==") and pin in packages.read_text() for pin in pins)
    assert gate(checkout, "--subject=vllm").returncode == 0
    assert "vllm]" not in calls(checkout)
    assert (checkout / ".venv-vllm-without-gpu" / "bin" / "python").exists()
    installed = [line for line in calls(checkout).splitlines() if "-m pip install" in line]
    assert f"-c {checkout}/ci/constraints.txt -e .[test]" in installed[0]
    assert installed[1].endswith(f"--no-deps -r {packages}")
    gate(checkout, "--subject=vllm")
    assert calls(checkout).count("-m pip install") == 2
    with packages.open("a") as file:
        file.write("another==1.0\n")
    gate(checkout, "--subject=vllm")
    assert calls(checkout).count("-m pip install") == 4


@pytest.mark.parametrize(
    ("arguments", "environment"),
    [
        (["plan", "--subject", "torch"], ".venv"),
        (["plan", "--subject=vllm"], ".venv-vllm"),
        (["plan", "--subject=vllm_lorakernels"], ".venv-vllm"),
        (["replay", "torch.dense_delta.tokens-6"], ".venv"),
        (["replay", "vllm.dense_delta.tokens-6", "--draw", "3"], ".venv-vllm"),
        (["replay", "--draw=3", "vllm.dense_delta.tokens-6"], ".venv-vllm"),
        (["replay", "vllm_lorakernels.dense_delta.tokens-6"], ".venv-vllm"),
        (["replay", "my.vllm.module:Subject.dense_delta"], ".venv"),
        (["faults", "--only", "vllm.x"], ".venv"),
        (["findings"], ".venv-vllm"),
        (["bench", "dense"], ".venv-vllm"),
        (["bench", "dense", "--against", "main"], ".venv"),
        (["bench", "dense", "--against=main"], ".venv"),
        (["bench", "moe"], ".venv-vllm"),
    ],
)
def test_a_command_runs_in_the_environment_that_it_needs(checkout, arguments, environment):
    install_python(checkout, FAKE_PYTHON)
    install(checkout, "nvidia-smi", "#!/bin/bash\nexit 0\n")
    done = call(str(checkout / "ci" / "loragate"), checkout, *arguments)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{checkout}/{environment}/bin/python ")
    assert calls(checkout).endswith(f"-m loragate {' '.join(arguments)}\n")


@pytest.mark.parametrize("script", ["gate", "loragate"])
def test_reports_learn_how_the_folder_of_the_caller_reaches_the_command(checkout, script):
    install_python(checkout, FAKE_PYTHON)
    for folder, path in ((".", "./ci"), ("ci", "."), ("ci/results", ".."), ("..", "checkout/ci")):
        done = call(f"{path}/{script}", checkout, "plan", folder=checkout / folder)
        assert done.stdout.split()[1] == f"{path}/loragate"
    done = call(str(checkout / "ci" / script), checkout, "plan")
    assert done.stdout.split()[1] == str(checkout / "ci" / "loragate")


def test_an_installation_that_failed_is_tried_again(checkout):
    install_python(checkout, FAKE_PYTHON + '[ "$3" != install ]\n')
    assert gate(checkout).returncode == ExitCode.INFRASTRUCTURE
    assert gate(checkout).returncode == ExitCode.INFRASTRUCTURE
    assert calls(checkout).count("-m pip install") == 2


def test_an_interpreter_of_the_caller_is_used_and_nothing_is_installed(checkout):
    shutil.copytree(ROOT / "harness", checkout / "harness")
    done = gate(checkout, "--help", LORAGATE_PYTHON=sys.executable)
    assert done.returncode == 0, done.stderr
    assert "usage: loragate gate" in done.stdout
    assert not (checkout / ".venv").exists()


def test_an_interpreter_that_lacks_packages_is_refused_by_their_names(checkout):
    bare = checkout.parent / "bare"
    bare.write_text(f'#!/bin/bash\nexec {sys.executable} -I -S "$@"\n')
    bare.chmod(0o755)
    done = gate(checkout, LORAGATE_PYTHON=str(bare))
    assert done.returncode == ExitCode.INFRASTRUCTURE
    assert "missing: torch, triton" in done.stderr


@pytest.mark.parametrize("script", ["ci/gate", "ci/loragate", "ci/test", ".ci/run"])
def test_a_command_can_be_run_as_it_is(script):
    assert os.access(ROOT / script, os.X_OK)
    subprocess.run(["bash", "-n", ROOT / script], check=True)
