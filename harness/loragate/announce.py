"""Write the plan of a run as its first event.

Knowing what a subject supports means importing it and asking for the device, so this happens in
a process of its own: whoever starts a run keeps free of torch, and of a CUDA context that would
take memory from the workers.
"""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from loragate.environment import commit_and_tree, host, project_root, utc_now, versions
from loragate.matrix.ids import run_id
from loragate.matrix.load import load_cases
from loragate.report.events import Expected, RunStarted, Skipped
from loragate.report.log import EventWriter
from loragate.selection import Selection
from loragate.verdict import ExitCode

if TYPE_CHECKING:
    from loragate.subjects.protocol import Capabilities


class AnnounceError(Exception):
    """The run cannot be planned; `exit_code` tells whose fault it is."""

    def __init__(self, message: str, exit_code: ExitCode) -> None:
        super().__init__(message)
        self.exit_code = exit_code


@dataclass(frozen=True, slots=True, kw_only=True)
class Announcement:
    """`leg` runs the selected cases, of which `only` keeps some (None: all). `owed` is what
    the other legs owe."""

    run: str
    events: Path
    selection: Selection
    leg: str
    legs: tuple[str, ...]
    only: frozenset[str] | None = None
    owed: tuple[Expected, ...] = ()


def announce(announcement: Announcement) -> None:
    """Append RunStarted to `announcement.events`. Raises AnnounceError."""
    child = subprocess.run(
        [sys.executable, "-m", __name__],
        input=pickle.dumps(announcement),
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
    )
    if child.returncode == 0:
        return
    message = child.stderr.decode(errors="replace").strip()
    if child.returncode == ExitCode.USAGE.value:
        raise AnnounceError(message, ExitCode.USAGE)
    raise AnnounceError(f"the run cannot be planned:\n{message}", ExitCode.INFRASTRUCTURE)


def _started_event(announcement: Announcement) -> RunStarted:
    """The plan as it stands on this machine. Raises ValueError for what the user got wrong."""
    expected, skipped = _plan(announcement)
    commit, tree = commit_and_tree(project_root())
    return RunStarted(
        run=announcement.run,
        started_at=utc_now(),
        tier=announcement.selection.tier,
        subjects=announcement.selection.subjects,
        legs=announcement.legs,
        expected=(*expected, *announcement.owed),
        skipped=skipped,
        commit=commit,
        tree=tree,
        versions=versions(),
        machine={**host(), **_device()},
    )


def _capabilities(name: str) -> Capabilities | str:
    from loragate.machine import detect_machine
    from loragate.subjects import find_subject

    return find_subject(name).capabilities(detect_machine())


def _plan(announcement: Announcement) -> tuple[tuple[Expected, ...], tuple[Skipped, ...]]:
    from loragate.subjects.protocol import unsupported

    selection = announcement.selection
    cases = load_cases(selection.matrix)
    expected: list[Expected] = []
    skipped: list[Skipped] = []
    for subject in selection.subjects:
        have = _capabilities(subject)
        owed: dict[str, list[str]] = {}
        for case in selection.cases(subject, cases):
            name = run_id(subject, case)
            if announcement.only is not None and name not in announcement.only:
                continue
            reason = None if isinstance(have, str) else unsupported(case, have)
            if reason is None:
                owed.setdefault(case.site.value, []).append(name)
            else:
                skipped.append(
                    Skipped(run_id=name, subject=subject, site=case.site.value, reason=reason)
                )
        expected += [
            Expected(
                leg=announcement.leg,
                subject=subject,
                site=site,
                count=len(names),
                run_ids=tuple(names),
            )
            for site, names in sorted(owed.items())
        ]
    return tuple(expected), tuple(skipped)


def _device() -> Mapping[str, str]:
    from loragate.machine import detect_machine

    machine = detect_machine()
    capability = machine.compute_capability
    return {
        "device": machine.device,
        "device_name": machine.name,
        "compute_capability": "{}.{}".format(*capability) if capability else "",
        "device_memory_bytes": str(machine.memory_bytes),
    }


def _main() -> int:
    from loragate.machine import select_interpreter

    announcement: Announcement = pickle.load(sys.stdin.buffer)
    select_interpreter()
    try:
        event = _started_event(announcement)
    except ValueError as error:
        print(error, file=sys.stderr)
        return ExitCode.USAGE.value
    with EventWriter(announcement.events, run=announcement.run) as writer:
        writer.write(event)
    return ExitCode.OK.value


if __name__ == "__main__":
    sys.exit(_main())
