"""A trial of a scan once more: the same processes, under the same conditions, until it shows
something else."""

from __future__ import annotations

import platform
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from loragate.core.errors import CommandError
from loragate.core.gpu_health import NoHealth
from loragate.core.output import say
from loragate.core.plural import counted
from loragate.core.verdict import ExitCode
from loragate.history import Outcome, Purpose, ScanRun, open_history
from loragate.matrix.case_run import CaseRun
from loragate.nightly.conditions import PLAIN, Conditions
from loragate.nightly.wave import Wanted
from loragate.report.text import headline
from loragate.scan.devices import Devices
from loragate.scan.investigate import signatures_of
from loragate.scan.processes import Processes
from loragate.scan.surroundings import Shown, Surroundings
from loragate.scan.waves import Waves, alone

# of a digest: enough to tell those of a replay apart
_DIGITS = 12
_EXIT_CODES = {
    Outcome.INFRA: ExitCode.INFRASTRUCTURE,
    Outcome.UNKNOWN: ExitCode.INCOMPLETE,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """before: what each process runs first. others: GPUs whose results count as well."""

    wanted: Wanted
    conditions: Conditions
    times: int
    before: tuple[Wanted, ...] = ()
    others: tuple[str, ...] = ()

    @property
    def what(self) -> str:
        """What the trials have in common, in words."""
        varied = [f"{name} {value}" for name, value in self.conditions.varied().items()]
        return ", ".join([*varied, *(f"after {w.case}#{w.draw}" for w in self.before)]) or "alone"

    @property
    def references(self) -> tuple[Conditions, ...]:
        """Under which the case runs once and alone before. A factor may change each result in the
        same way, so that only one with nothing varied tells."""
        plain = replace(PLAIN, gpu=self.conditions.gpu)
        if self.before or self.conditions != plain:
            return (plain,)
        return tuple(replace(plain, gpu=gpu) for gpu in self.others)


def run_again(asked: Asked, runs: Sequence[CaseRun], devices: Devices) -> ExitCode:
    """Run what is asked for, and say what each trial shows. runs: all that `asked` names. Raises
    CommandError where a trial could not be made."""
    with (
        tempfile.TemporaryDirectory(prefix="loragate-replay-") as path,
        Processes(sorted({run.subject for run in runs}), Path(path) / "log") as processes,
        # waves write down their trials; nobody needs those of a replay
        open_history(Path(path) / "history.db") as history,
    ):
        run = ScanRun(uid="replay", machine=platform.node(), started_at=time.time())
        history.add_run(run)
        around = Surroundings(
            run=run.uid,
            runs={run.run_id: run for run in runs},
            history=history,
            processes=processes,
            health=NoHealth(),
            folder=Path(path),
            shares=devices.shares(1 + asked.conditions.neighbours),
        )
        return _Again(asked, Waves(around)).run()


class _Again:
    def __init__(self, asked: Asked, waves: Waves) -> None:
        self._asked, self._waves = asked, waves
        # a path is of no use here, and tracing it takes time that a scan did not take
        waves.trials.paths[asked.wanted.case] = ("", "")
        waves.trials.paths |= {wanted.case: ("", "") for wanted in asked.before}
        self._signatures: set[str] = set()
        self._trials = 0
        self._is_promised = True

    def run(self) -> ExitCode:
        asked = self._asked
        say(f"{asked.wanted.id}: {asked.what}")
        for conditions in asked.references:
            gpu = f" on GPU {conditions.gpu}" if conditions.gpu else ""
            if self._shows(f"nothing varied{gpu}", [asked.wanted], conditions):
                return self._changed()
        for number in range(1, asked.times + 1):
            if self._shows(f"trial {number}", [*asked.before, asked.wanted], asked.conditions):
                return self._changed()
        what = (
            "the same" if self._is_promised else "no equal bits are promised, and nothing is wrong"
        )
        say(f"{what} in {counted(self._trials, 'trial')}")
        return ExitCode.OK

    def _shows(self, name: str, steps: Sequence[Wanted], conditions: Conditions) -> bool:
        """Whether one more trial is wrong, or unlike those before it."""
        shown = self._waves.run(
            alone(steps, conditions),
            Purpose.DIAGNOSE,
            # each trial has a deadline of its own
            until=float("inf"),
            keeps=lambda index, process: index == len(steps) - 1,
        )
        if not shown:
            raise CommandError(f"{name}: what ran before ended the process", ExitCode.INCOMPLETE)
        for number, each in enumerate(sorted(shown, key=lambda each: each.record.process), 1):
            self._tell(name if len(shown) == 1 else f"{name}, process {number}", each)
        if any(each.measured.outcome is Outcome.WRONG for each in shown):
            return True
        is_different = any(each.measured.outcome is Outcome.DIFFERENT for each in shown)
        return self._is_promised and (is_different or len(self._signatures) > 1)

    def _tell(self, name: str, each: Shown) -> None:
        measured = each.measured
        if measured.outcome in _EXIT_CODES:
            message = f"{name}: {headline(measured.message) or measured.outcome}"
            raise CommandError(message, _EXIT_CODES[measured.outcome])
        self._trials += 1
        self._is_promised &= measured.promised
        self._signatures.update(signatures_of(measured))
        digests = dict.fromkeys(digest[:_DIGITS] for digest in measured.digests)
        words = [measured.outcome.value, measured.failure, *digests]
        say(f"{name}: {' '.join(word for word in words if word)}")
        if measured.message:
            say(f"  {headline(measured.message)}")

    def _changed(self) -> ExitCode:
        results = counted(len(self._signatures), "result")
        say(f"{results} in {counted(self._trials, 'trial')} of the same inputs")
        return ExitCode.WRONG
