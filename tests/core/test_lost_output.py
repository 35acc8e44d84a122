"""Commands whose reader has left, or whose output goes to a full disk."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from loragate.commands.mutants import EQUIVALENTS
from loragate.core.checkout import project_root
from loragate.core.verdict import ExitCode

RECORD = str(project_root() / "ci/results/cpu.json")
EDITS = str(next((EQUIVALENTS.parent / "blind").glob("*.yaml")))
COMMANDS = [
    ("mutants", "--edits", EDITS, "--list"),
    ("plan", "--tier", "smoke"),
    ("faults", "--show", RECORD),
    ("bench", "show", str(project_root() / "ci/results/nvidia-h200.json"), "dense"),
]


@pytest.mark.parametrize("where", ["a full disk", "nobody"])
@pytest.mark.parametrize("arguments", COMMANDS, ids=lambda arguments: arguments[0])
def test_a_command_does_not_depend_on_who_reads_it(arguments: tuple[str, ...], where: str) -> None:
    if where == "nobody":
        reader, output = os.pipe()
        os.close(reader)
    else:
        output = os.open("/dev/full", os.O_WRONLY)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "loragate", *arguments],
            stdout=output,
            stderr=subprocess.PIPE,
            text=True,
            timeout=120,
            check=False,
        )
    finally:
        os.close(output)
    assert (done.returncode, done.stderr) == (ExitCode.OK, "")
