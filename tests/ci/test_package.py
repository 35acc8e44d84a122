"""The wheel: built from the source distribution, installed apart from the checkout, and used."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from collections.abc import Callable, Iterable
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from loragate.core.verdict import ExitCode
from loragate.events.log import read_events
from loragate.report.summary import summarize

ROOT = Path(__file__).parents[2]
CASE = "dense_delta.in-257.tokens-6"
NEEDED = (
    "loragate/data/cases/dense_delta.yaml",
    "loragate/data/cases/test_cases.py",
    "loragate/data/cases/findings/vllm.yaml",
    "loragate/data/ci/baselines/resources.json",
    "loragate/data/conftest.py",
    "loragate/data/pyproject.toml",
    "loragate/report/templates/index.html.j2",
    "loragate/report/templates/style.css",
    "loragate/py.typed",
    "lorakernels/py.typed",
    "lorakernels/dense/kernels.py",
)
# parts of a declared package that are distributions of their own
PARTS = {"markupsafe": "jinja2", "pydantic-core": "pydantic"}
Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the source distribution and the wheel that was built from it."""
    pytest.importorskip("build", reason="install the extra loragate[test]")
    pytest.importorskip("hatchling", reason="install the extra loragate[test]")
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def installed(distributions: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Runs a module with the wheel, in an empty folder. What the wheel depends on is taken from
    the environment of the tests, whose own loragate is hidden behind that of the wheel."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    (wheel,) = distributions.glob("*.whl")
    (packages,) = folder.glob("lib/*/site-packages")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(packages)
    others = [path for path in sys.path if Path(path).name == "site-packages"]
    (packages / "others.pth").write_text("\n".join(others))
    empty = tmp_path_factory.mktemp("empty")
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST_", "PYTHONPATH"))}

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(python), *arguments],
            cwd=empty,
            # a worker more would import torch once more
            env=kept | {"CUDA_VISIBLE_DEVICES": "", "PYTEST_XDIST_AUTO_NUM_WORKERS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=240,
        )

    return run


def test_the_wheel_holds_what_the_gate_needs_and_no_tests(distributions: Path) -> None:
    (wheel,) = distributions.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    assert set(NEEDED) <= names
    assert not any(name.startswith(("tests/", "docs/", "ci/")) for name in names)
    (source,) = distributions.glob("*.tar.gz")
    with tarfile.open(source) as archive:
        listed = {name.partition("/")[2] for name in archive.getnames()}
    assert {"ci/hatch_build.py", "ci/gate", "tests/conftest.py", "LICENSE"} <= listed


def test_every_package_that_is_imported_is_a_declared_dependency() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    declared = distributions_of(project["dependencies"])
    for extra in project["optional-dependencies"].values():
        declared |= distributions_of(extra)
    installed = packages_distributions()
    imported = imported_packages() - set(sys.stdlib_module_names) - {"loragate", "lorakernels"}
    assert "torch" in imported
    missing = {
        package
        for package in imported
        # what is not installed here has the name of its package
        if not {PARTS.get(normal(name), normal(name)) for name in installed.get(package, [package])}
        & declared
    }
    assert not missing


def imported_packages() -> set[str]:
    found = set()
    for folder in ("harness/loragate", "kernels/lorakernels"):
        for file in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Import):
                    found |= {alias.name.partition(".")[0] for alias in node.names}
                elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                    found.add(node.module.partition(".")[0])
    return found


def distributions_of(requirements: Iterable[str]) -> set[str]:
    return {normal(re.split(r"[^A-Za-z0-9_.-]", line, maxsplit=1)[0]) for line in requirements}


def normal(name: str) -> str:
    return name.lower().replace("_", "-")


def test_the_gate_of_the_wheel_judges_a_case_in_an_empty_folder(
    installed: Run, tmp_path: Path
) -> None:
    where = "import loragate, lorakernels; print(loragate.__file__, lorakernels.__file__)"
    assert str(ROOT) not in installed("-c", where).stdout
    report = tmp_path / "report"
    subject = ("--subject", "lorakernels")
    done = installed("-m", "loragate", "gate", *subject, "--cases", CASE, "--report", str(report))
    assert done.returncode == ExitCode.OK, done.stdout
    summary = summarize(read_events(report / "events.jsonl"))
    assert summary.total.passed == summary.total.expected > 0
    assert "host tests of lorakernels are part of a checkout and were not run" in summary.notes


def test_a_folder_of_ones_own_runs_the_cases_of_the_wheel_under_pytest(
    installed: Run, tmp_path: Path
) -> None:
    for name in ("conftest.py", "cases/test_cases.py"):
        (tmp_path / Path(name).name).write_text((ROOT / name).read_text())
    options = {"subject": "torch", "cases": CASE, "report": tmp_path / "report"}
    given = (f"--loragate-{name}={value}" for name, value in options.items())
    done = installed("-m", "pytest", f"--rootdir={tmp_path}", str(tmp_path), *given)
    assert done.returncode == 0, done.stdout
    assert "1 passed" in done.stdout
