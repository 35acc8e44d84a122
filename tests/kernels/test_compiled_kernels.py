"""On a machine with a GPU, files of host tests run once more, with compiled kernels.

The interpreter is on in this process, so each file gets a process of its own. What its tests
compare holds for both; those about the order of launches need compiled kernels.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

TESTS = Path(__file__).resolve().parents[1]
DEADLINE_S = 500


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(
    "file",
    [
        "kernels/test_batch_tables.py",
        "kernels/test_far_and_late.py",
        "kernels/test_prepared_operations.py",
        "moe/test_forced_plans.py",
        "moe/test_pair_tables.py",
    ],
)
def test_compiled_kernels_pass_the_tests_of(file: str) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    # a conftest would turn the interpreter on; the profile has no deadline for an example, which
    # compiles kernels on a machine that is busy
    options = ["--noconftest", "--quiet", "-p", "no:cacheprovider", "--hypothesis-profile=ci"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, str(TESTS / file)],
        env=environment,
        cwd=TESTS.parent,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout
