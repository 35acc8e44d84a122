"""Scans with a real GPU: what a CPU cannot show."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from loragate.history import Outcome, Purpose, TrialRecord, open_history
from loragate.nightly.conditions import Cause

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or bool(os.environ.get("TRITON_INTERPRET")),
    reason="needs a GPU, and Triton without its interpreter",
)

_PLANTED = Path(__file__).parent / "planted"
_ROOT = Path(__file__).parents[2]


def _scan(folder: Path, budget: str, *arguments: str) -> tuple[list[TrialRecord], str]:
    folders = [_PLANTED, _ROOT / "harness", _ROOT / "kernels", os.environ.get("PYTHONPATH", "")]
    command = [
        *(sys.executable, "-m", "loragate", "scan", f"--budget={budget}", *arguments),
        *(f"--history={folder / 'h.db'}", f"--report={folder / 'report'}"),
    ]
    done = subprocess.run(
        command,
        cwd=_ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, folders))},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
    )
    with open_history(folder / "h.db") as history:
        return list(history.trials()), done.stdout


def test_the_projects_own_kernels_give_the_same_bits_and_their_gpu_is_recorded(
    tmp_path: Path,
) -> None:
    trials, output = _scan(tmp_path, "120s", "--tier=smoke", "--cases=dense_delta.tokens-2")
    planned = [trial for trial in trials if trial.purpose is Purpose.PLANNED]
    assert len({trial.process for trial in planned}) > 2, output
    wrong = [t for t in planned if t.outcome not in (Outcome.RIGHT, Outcome.UNKNOWN)]
    assert not wrong, output
    assert all(trial.device.startswith("cuda ") for trial in planned), output
    assert all(trial.path_key for trial in planned), output
    assert any("lora_shrink_kernel" in trial.path for trial in planned), output
    assert all(trial.health.get("sm_clock_mhz", 0) > 0 for trial in planned), output
    digests: dict[tuple[str, int], set[str]] = {}
    for trial in planned:
        if trial.digest:
            digests.setdefault((trial.case, trial.draw), set()).add(trial.digest)
    assert all(len(found) == 1 for found in digests.values()), output


def test_atomic_additions_of_a_kernel_are_found_and_named(tmp_path: Path) -> None:
    subject, matrix = "planted_on_a_gpu:Atomics", _PLANTED / "planted.yaml"
    trials, output = _scan(tmp_path, "240s", f"--subject={subject}", f"--matrix={matrix}")
    causes = {trial.cause for trial in trials if trial.cause}
    assert causes == {Cause.RUN_TO_RUN}, output
    assert all("add_atomically" in trial.path for trial in trials), output
