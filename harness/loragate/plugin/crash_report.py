"""What a dead worker could not write any more, told from the stacks that it left."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from loragate.core.verdict import Failure, Verdict
from loragate.events.model import CaseFinished
from loragate.matrix.selection import CaseRun

_HANG_SIGN = "Timeout ("
_MAX_LINES = 60
_MACHINERY = ("/_pytest/", "/pluggy/", "/xdist/", "/execnet/", 'File "<string>"')


def write_obituary(
    run: CaseRun,
    *,
    worker: str,
    gpu: str,
    duration_s: float,
    stacks: Path,
    neighbours: Sequence[str],
) -> CaseFinished:
    """The end of a case that took its worker with it.

    `neighbours` are the cases that the worker ran before, the oldest first.
    """
    dump = _read(stacks)
    hung = _HANG_SIGN in dump
    what = f"no end within {run.case.timeout_s:g} s" if hung else f"worker {worker} died"
    parts = [what]
    if neighbours:
        parts += ["ran before on this worker:", *(f"  {name}" for name in neighbours)]
    if dump:
        parts += _told(dump)
    return CaseFinished(
        run_id=run.run_id,
        subject=run.subject,
        site=run.case.site.value,
        attempt=run.attempt,
        seed=run.seed,
        worker=worker,
        verdict=Verdict.FAIL,
        judgements=(),
        duration_s=duration_s,
        replay=run.replay,
        gpu=gpu,
        failure=Failure.HANG if hung else Failure.CRASH,
        message="\n".join(parts),
    )


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _told(dump: str) -> list[str]:
    """The dump without the frames of pytest below the case: they are the same in every dump."""
    lines = [line for line in dump.splitlines() if not any(part in line for part in _MACHINERY)]
    rest = len(lines) - _MAX_LINES
    # the innermost frames come first
    return [*lines[:_MAX_LINES], *([f"... {rest} more lines"] if rest > 0 else [])]
