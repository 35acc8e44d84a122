"""The plan of a run as its first event.

Knowing what a subject supports means importing it and asking for the device, so this happens in
a process of its own: whoever starts a run keeps free of torch, and of a CUDA context that would
take memory from the workers.
"""

from __future__ import annotations

import pickle
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from loragate.core.checkout import commit_and_tree, project_root
from loragate.core.errors import CommandError
from loragate.core.machine import Machine, detect_machine, select_interpreter
from loragate.core.verdict import ExitCode
from loragate.core.versions import host, utc_now, versions
from loragate.events.log import EventWriter, read_events
from loragate.events.model import Event, Expected, KnownFinding, Note, RunStarted, Skipped
from loragate.findings.load import ledger_path, load_ledger
from loragate.matrix.load import load_cases
from loragate.matrix.plan import Candidate, Plan, PlannedCase, plan
from loragate.matrix.plan import Skipped as SkippedCase
from loragate.matrix.selection import Selection

if TYPE_CHECKING:
    from loragate.protocol import Capabilities


class AnnounceError(CommandError):
    """The run cannot be planned."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Announcement:
    """`leg` runs the selected cases, of which `only` keeps some (None: all). `owed` is what
    the other `legs` owe. The run is to be kept in the file `record`."""

    run: str
    selection: Selection
    leg: str
    legs: tuple[str, ...]
    only: frozenset[str] | None = None
    owed: tuple[Expected, ...] = ()
    record: Path | None = None


def announce(announcement: Announcement) -> tuple[Event, ...]:
    """The events that a run begins with: RunStarted, then notes and what is known of the subjects.
    Raises AnnounceError."""
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "plan.jsonl"
        child = subprocess.run(
            [sys.executable, "-m", "loragate.run.opening", str(answer)],
            input=pickle.dumps(announcement),
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
        )
        message = child.stderr.decode(errors="replace").strip()
        if child.returncode == ExitCode.USAGE.value:
            raise AnnounceError(message, ExitCode.USAGE)
        if child.returncode != 0:
            text = f"the run cannot be planned on this machine:\n{message}"
            raise AnnounceError(text, ExitCode.INFRASTRUCTURE)
        return read_events(answer).events


def plan_selection(selection: Selection) -> tuple[Plan, Mapping[str, Capabilities | str]]:
    """The plan on this machine, and what each subject can do here.

    Raises ValueError for what the user got wrong. Otherwise imports torch and the subjects.
    """
    cases = load_cases(selection.matrix)
    select_interpreter()
    from loragate.run.trial import load_subject, refusal

    abilities = {name: load_subject(name)[1] for name in selection.subjects}
    candidates = [Candidate(name, partial(refusal, have=have)) for name, have in abilities.items()]
    made = plan(
        cases,
        candidates,
        selection.tier,
        detect_machine(),
        attempts=selection.attempts,
        patterns=selection.patterns,
    )
    return made, abilities


def opening(announcement: Announcement) -> Iterator[Event]:
    """The same in this process. Raises ValueError for what the user got wrong."""
    selection = announcement.selection
    made, abilities = plan_selection(selection)
    unusable = {name: have for name, have in abilities.items() if isinstance(have, str)}
    expected, skipped = _rows(made, unusable.keys(), announcement)
    commit, tree = commit_and_tree(project_root(), ignoring=announcement.record)
    yield RunStarted(
        run=announcement.run,
        started_at=utc_now(),
        tier=selection.tier,
        subjects=selection.subjects,
        legs=announcement.legs,
        expected=(*expected, *announcement.owed),
        skipped=skipped,
        attempts=selection.attempts,
        commit=commit,
        tree=tree,
        versions=versions(),
        machine={**host(), **_device(made.machine)},
    )
    for name, reason in unusable.items():
        yield Note(text=f"subject {name} can run nothing here: {reason}")
    yield from _listed(selection.subjects)


def _listed(subjects: Collection[str]) -> Iterator[KnownFinding]:
    path, found = ledger_path(), versions()
    # outside of the checkout nothing is known, and whatever fails is red
    for finding in load_ledger(path) if path.exists() else ():
        if finding.case is not None and finding.subject in subjects:
            yield KnownFinding(finding=finding, version=found.get(finding.subject, ""))


def _rows(
    made: Plan, unusable: Collection[str], announcement: Announcement
) -> tuple[tuple[Expected, ...], tuple[Skipped, ...]]:
    owed: dict[tuple[str, str], dict[str, None]] = {}
    skipped: list[Skipped] = []
    items: tuple[PlannedCase | SkippedCase, ...] = (*made.planned, *made.skipped)
    for item in items:
        if announcement.only is not None and item.run_id not in announcement.only:
            continue
        site = item.case.site.value
        # a subject that was asked for and can run nothing still owes everything: a missing
        # package is no reason to be green
        if isinstance(item, PlannedCase) or item.subject in unusable:
            owed.setdefault((item.subject, site), {})[item.run_id] = None
        else:
            skipped.append(
                Skipped(run_id=item.run_id, subject=item.subject, site=site, reason=item.reason)
            )
    expected = (
        Expected(
            leg=announcement.leg,
            subject=subject,
            site=site,
            count=len(names),
            run_ids=tuple(names),
        )
        for (subject, site), names in sorted(owed.items())
    )
    return tuple(expected), tuple(skipped)


def _device(machine: Machine) -> Mapping[str, str]:
    capability = machine.compute_capability
    return {
        "device": machine.device,
        "device_name": machine.name,
        "compute_capability": ".".join(map(str, capability)) if capability else "",
        "device_memory_bytes": str(machine.memory_bytes),
    }


def _main(answer: Path) -> int:
    announcement: Announcement = pickle.load(sys.stdin.buffer)
    try:
        events = tuple(opening(announcement))
    except ValueError as error:
        print(error, file=sys.stderr)
        return ExitCode.USAGE.value
    with EventWriter(answer, run=announcement.run) as writer:
        for event in events:
            writer.write(event)
    return ExitCode.OK.value


if __name__ == "__main__":
    sys.exit(_main(Path(sys.argv[1])))
