"""The end of a case that killed its worker, as another process writes it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from loragate.core.verdict import Failure
from loragate.matrix.case import Case, Dtype, Site
from loragate.matrix.case_run import CaseRun
from loragate.plugin.crash_report import crash_report

if TYPE_CHECKING:
    from pathlib import Path

    from loragate.events.model import CaseFinished

CASE = Case(
    site=Site.DENSE_DELTA,
    tokens=5,
    in_features=16,
    slices=(16,),
    rank=8,
    slots=2,
    dtype=Dtype.FP32,
    timeout_s=2.0,
)


def end_with(stacks: Path, duration_s: float) -> CaseFinished:
    run = CaseRun("a", CASE)
    return crash_report(
        run, worker="gw0", gpu="", duration_s=duration_s, stacks=stacks, ran_before=()
    )


def test_a_hung_case_lasted_until_its_deadline_though_its_start_was_heard_of_late(tmp_path):
    stacks = tmp_path / "stacks"
    stacks.write_text("Timeout (0:00:02)!\nThread 0x1 (most recent call first):\n")
    assert end_with(stacks, duration_s=1.975).duration_s == 2.0
    assert end_with(stacks, duration_s=2.5).duration_s == 2.5


def test_a_crashed_case_lasted_until_its_worker_died(tmp_path):
    crash = end_with(tmp_path / "never written", duration_s=0.5)
    assert (crash.failure, crash.duration_s) == (Failure.CRASH, 0.5)


def test_the_stack_of_a_crash_does_not_make_it_a_hang(tmp_path):
    stacks = tmp_path / "stacks"
    stacks.write_text("Fatal Python error: Segmentation fault\n  File 'x.py', line 3 in f\n")
    crash = end_with(stacks, duration_s=0.5)
    assert crash.failure is Failure.CRASH
    assert crash.message.startswith("worker gw0 died\nFatal Python error: Segmentation fault\n")


def test_of_a_long_dump_the_innermost_frames_are_shown(tmp_path):
    stacks = tmp_path / "stacks"
    frames = [f'  File "deep.py", line {line} in f' for line in range(100)]
    stacks.write_text("\n".join(["Thread 0x1 (most recent call first):", *frames]))
    shown = end_with(stacks, duration_s=0.5).message.splitlines()
    assert shown[2] == frames[0]
    assert shown[-2:] == [frames[58], "... 41 more lines"]
