"""The end of a case whose process died, reconstructed from the stacks that the process left."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from loragate.core.verdict import Failure, Verdict
from loragate.events.case_end import end_of
from loragate.events.model import CaseFinished
from loragate.matrix.case_run import CaseRun

_TIMEOUT_HEADER = "Timeout ("
_MAX_LINES = 60
# frames around a case, which are the same in every dump
_OUTER_FRAMES = (
    *("/_pytest/", "/pluggy/", "/xdist/", "/execnet/", 'File "<string>"'),
    *("/loragate/run/replay_process.py", 'File "<frozen runpy>"'),
)


def crash_report(
    run: CaseRun,
    *,
    worker: str,
    gpu: str,
    duration_s: float,
    stacks: Path,
    ran_before: Sequence[str],
    died: str | None = None,
) -> CaseFinished:
    """The end of a case that killed its process.

    duration_s: measured by another process, which hears late of the start of the case.
    stacks: the file that the process dumped its stacks to; it need not exist.
    ran_before: ids of the last runs of this process, the oldest first.
    died: how the process died, where that is known.
    """
    dump = _read(stacks)
    hung = _TIMEOUT_HEADER in dump
    crashed = died or f"worker {worker} died"
    what = f"no end within {run.case.timeout_s:g} s" if hung else crashed
    parts = [what]
    if ran_before:
        parts += ["ran before on this worker:", *(f"  {name}" for name in ran_before)]
    if dump:
        parts += _shown(dump)
    return end_of(
        run,
        Verdict.FAIL,
        worker=worker,
        gpu=gpu,
        # a case that hung ran until its deadline, whenever its start was heard of
        duration_s=max(duration_s, run.case.timeout_s) if hung else duration_s,
        failure=Failure.HANG if hung else Failure.CRASH,
        message="\n".join(parts),
    )


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def read_stacks(stacks: Path) -> tuple[bool, list[str]]:
    """Whether a worker ended at its deadline, and the stacks that it dumped into `stacks`."""
    dump = _read(stacks)
    return _TIMEOUT_HEADER in dump, _shown(dump) if dump else []


def _shown(dump: str) -> list[str]:
    lines = [line for line in dump.splitlines() if not any(part in line for part in _OUTER_FRAMES)]
    rest = len(lines) - _MAX_LINES
    # the innermost frames come first
    return [*lines[:_MAX_LINES], *([f"... {rest} more lines"] if rest > 0 else [])]
