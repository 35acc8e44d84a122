"""These tests are about host logic and small numbers: they run in Triton's interpreter even on a
machine with a GPU. The switch must be set before lorakernels is imported."""

import os
import subprocess
import sys
from collections.abc import Callable

import pytest

os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture
def run_compiled() -> Callable[[str], None]:
    """Runs a script in a process of its own, where kernels are compiled for the GPU."""

    def run(script: str) -> None:
        compiled = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
        command = (sys.executable, "-c", script)
        done = subprocess.run(command, env=compiled, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr

    return run
