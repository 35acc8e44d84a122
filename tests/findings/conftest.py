"""A checkout whose ledger is about the package that looks like vLLM, and commands in it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

_HERE = Path(__file__).parent
_ROOT = _HERE.parents[1]


@dataclass(frozen=True)
class Ended:
    exit_code: int
    output: str


@pytest.fixture(scope="session")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The code of this one, with the ledger of this folder: the harness reads the ledger of the
    checkout that it lies in."""
    root = tmp_path_factory.mktemp("checkout")
    for name in ("harness", "kernels", "cases"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(_ROOT / name, root / name, ignore=ignored)
    for name in ("pyproject.toml", "conftest.py"):
        shutil.copy(_ROOT / name, root / name)
    shutil.copy(_HERE / "ledger.yaml", root / "cases" / "findings" / "vllm.yaml")
    return root


@pytest.fixture(scope="session")
def run_in_checkout(checkout: Path) -> Callable[..., Ended]:
    """Runs `python -m MODULE ARGUMENTS` in that checkout, with faults of the fake package."""

    def run(module: str, *arguments: str, faults: str = "") -> Ended:
        ours = ("PYTEST_", "COV_", "TRITON_INTERPRET")
        kept = {k: v for k, v in os.environ.items() if not k.startswith(ours)}
        folders = [checkout / "harness", checkout / "kernels", _ROOT / "tests" / "fake_vllm"]
        paths = os.pathsep.join(map(str, folders))
        done = subprocess.run(
            [sys.executable, "-m", module, *arguments],
            cwd=checkout,
            env={**kept, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": paths, "FAKE_VLLM": faults},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=240,
        )
        return Ended(done.returncode, done.stdout)

    return run
