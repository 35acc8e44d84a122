"""Runs units on a planted checkout, in a fork of a warm server, and says which one failed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from loragate.core.verdict import Failure, Verdict
from loragate.core.warm_server import ServerDied, WarmServer
from loragate.mutants.setup import Setup
from loragate.mutants.units import IMPORT, Ended, Order, Unit, read_transcript
from loragate.mutants.warm import run_order

# beyond the longest deadline within the process, which writes its stacks then
_GRACE_S = 60.0
_LAST_LINES = 6
# what judged a process that crashed or hung
AT_IMPORT, IN_A_UNIT = "import", "process"
# how faulthandler begins the stacks of a process that it ends
_TIMEOUT = "Timeout ("


def run_units(
    units: Sequence[Unit], folder: Path, cache: Path, setup: Setup, server: WarmServer
) -> tuple[Ended | None, list[Unit]]:
    """What fails the gate, or None, and the units that have run. Raises ServerDied."""
    if not units:
        return None, []
    transcript = folder / "transcript.jsonl"
    # of an earlier process
    transcript.unlink(missing_ok=True)
    order = Order(
        root=str(folder / "planted"),
        transcript=str(transcript),
        log=str(folder / "log.txt"),
        units=tuple(units),
        known=str(setup.known),
        cache=str(cache),
        least_deadline_s=setup.least_deadline_s,
    )
    patience = max(unit.deadline_s(setup.least_deadline_s) for unit in units) + _GRACE_S
    failure = run_order(server, order, patience)
    story = read_transcript(transcript)
    through = {ended.unit for ended in story.ended}
    ran = [unit for unit in units if unit.name in through]
    failed = next((ended for ended in story.ended if ended.fails_gate), None)
    if failed is not None or (failure is None and story.finished):
        return failed, ran
    if failure is Failure.CRASH and _TIMEOUT in text_of(folder / "planted" / "stacks.txt"):
        failure = Failure.HANG
    if not story.current:
        raise ServerDied(f"the process ended between two units: {_last(folder / 'log.txt')}")
    ended = Ended(
        unit=story.current,
        verdict=Verdict.FAIL,
        judge=AT_IMPORT if story.current == IMPORT else IN_A_UNIT,
        kind=(failure or Failure.CRASH).value,
        message=_last(folder / "log.txt"),
    )
    return ended, ran


def text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""


def _last(log: Path) -> str:
    fatal = [line for line in text_of(log).splitlines() if line.startswith("Fatal Python error")]
    if fatal:
        return fatal[-1]
    # the last line of a traceback says most
    return " | ".join(reversed(text_of(log).strip().splitlines()[-_LAST_LINES:]))
