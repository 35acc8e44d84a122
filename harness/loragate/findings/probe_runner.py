"""Runs probes in processes of their own, so that one that hangs or dies costs only its own line.

Probes of a group share a process as long as all goes well, because importing the package takes
longer than most of them; groups run side by side. A process imports the package and waits for a
line before it begins its first probe, so that a group that has to be alone can import beside the
others. Imports no torch.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event
from typing import TypeAlias

from loragate.core.child_process import python_module, signal_name
from loragate.core.errors import CommandError
from loragate.core.gpus import WITHOUT_MPS
from loragate.core.verdict import ExitCode
from loragate.findings.ledger import Observation, Seen

# of one probe, with the kernels that it compiles and, for the first, the import of the package
PATIENCE_S = 300.0
_TICK_S = 0.1
_LAST_CHARACTERS = 300
# the version of the package, and what each probe observed
_Run: TypeAlias = "Future[tuple[str, dict[str, Observation]]]"


@dataclass(slots=True)
class Record:
    """What a process has written; `began` is the probe that it was running."""

    version: str = ""
    refused: str = ""
    began: str = ""
    observed: dict[str, Observation] = field(default_factory=dict)
    lines: int = 0


def run_probes(
    groups: Sequence[Sequence[str]],
    *,
    last: Sequence[str] = (),
    may_be_last: Callable[[], bool] = lambda: True,
    patience_s: float = PATIENCE_S,
) -> tuple[str, dict[str, Observation]]:
    """The version of the installed package, and what each probe observed; a process for each group,
    and another one for what is left after one was lost. Probes of the group `last` begin when all
    others have ended and `may_be_last` says so, which no patience bounds. Raises CommandError."""
    version, observed, stopped = "", dict[str, Observation](), Event()
    first = list[_Run]()

    def others_have_ended() -> bool:
        return all(each.done() and not each.exception() for each in first) and may_be_last()

    with ThreadPoolExecutor(len(groups) + 1) as pool:
        try:
            for group in groups:
                first.append(pool.submit(_run_group, group, patience_s, lambda: True, stopped))
            # an empty group ends at once
            behind = pool.submit(_run_group, last, patience_s, others_have_ended, stopped)
            for run in as_completed([*first, behind]):
                of_group, found = run.result()
                version, observed = of_group or version, observed | found
        except BaseException:
            # such as Ctrl-C: no process is started any more, and those that run are ended
            stopped.set()
            raise
    return version, observed


def _run_group(
    group: Sequence[str], patience_s: float, may_begin: Callable[[], bool], stopped: Event
) -> tuple[str, dict[str, Observation]]:
    version, observed, left = "", dict[str, Observation](), list(group)
    while left and not stopped.is_set():
        record, ending = _run_process(left, patience_s, may_begin, stopped)
        if record.refused:
            raise CommandError(record.refused, ExitCode.INFRASTRUCTURE)
        if record.began and record.began not in record.observed:
            record.observed[record.began] = Observation(Seen.BROKEN, ending)
        if not record.observed:
            message = f"the process of the probes ran none of them: {ending}"
            raise CommandError(message, ExitCode.INFRASTRUCTURE)
        version, observed = record.version, observed | record.observed
        left = [name for name in left if name not in observed]
    return version, observed


def _run_process(
    names: Sequence[str], patience_s: float, may_begin: Callable[[], bool], stopped: Event
) -> tuple[Record, str]:
    """What the process recorded, and how it ended."""
    with tempfile.TemporaryDirectory(prefix="loragate-probes-") as name:
        path, log = Path(name) / "record.jsonl", Path(name) / "log"
        path.touch()
        command = python_module("loragate.findings.probe_child", str(path), *names)
        with log.open("wb") as output:
            # in the group of this process, so that it ends with it
            child = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=os.environ | WITHOUT_MPS,
            )
            try:
                _let_begin(child, may_begin, stopped)
                ending = _wait(child, path, patience_s, stopped)
            finally:
                child.kill()
                child.wait()
        last = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1:]
        said = f": {last[0][-_LAST_CHARACTERS:]}" if last else ""
        return read(path), f"{ending}{said}"


def _let_begin(
    child: subprocess.Popen[bytes], may_begin: Callable[[], bool], stopped: Event
) -> None:
    """Wait for `may_begin`, which no patience bounds, unless the process ends before."""
    begins = may_begin()
    while not (begins or stopped.wait(_TICK_S)) and child.poll() is None:
        begins = may_begin()
    assert child.stdin is not None
    # one that has ended or closed its input says why in its record or by its end
    with suppress(BrokenPipeError), child.stdin:
        if begins:
            child.stdin.write(b"\n")


def _wait(child: subprocess.Popen[bytes], record: Path, patience_s: float, stopped: Event) -> str:
    lines, waited = 0, 0.0
    while waited < patience_s and not stopped.is_set():
        try:
            return _describe(child.wait(_TICK_S))
        except subprocess.TimeoutExpired:
            waited += _TICK_S
        now = read(record).lines
        if now != lines:
            lines, waited = now, 0.0
    return f"gave no answer for {patience_s:g} s and was ended"


def _describe(exit_code: int) -> str:
    if exit_code >= 0:
        return f"its process ended with exit code {exit_code}"
    return f"its process was ended by {signal_name(exit_code)}"


def read(path: Path) -> Record:
    """The record so far; a line that is still being written counts as none."""
    record = Record()
    for line in path.read_text(encoding="utf-8").split("\n")[:-1]:
        fact = json.loads(line)
        record.lines += 1
        record.version = fact.get("version", record.version)
        record.refused = fact.get("refused", record.refused)
        record.began = fact.get("began", record.began)
        if "probe" in fact:
            record.observed[fact["probe"]] = Observation(Seen(fact["seen"]), fact["text"])
    return record
