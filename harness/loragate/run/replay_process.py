"""`python -m loragate.run.replay_process FOLDER`: run a case again, under its deadline.

The case has a process of its own, so that a hang or a crash ends nothing else. Invariant: every run
that ends is answered before the next one begins, so that the first one without an answer is the one
that the process died of.
"""

from __future__ import annotations

import os
import pickle
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from loragate.core.deadline import deadline, open_crash_file
from loragate.core.errors import CommandError, usage_errors
from loragate.core.machine import select_interpreter
from loragate.core.output import say
from loragate.core.verdict import ExitCode, Verdict
from loragate.events.model import CaseFinished
from loragate.matrix.case_run import CaseRun

# not `__name__`, which is "__main__" in the process itself
MODULE = "loragate.run.replay_process"
WORKER = "replay"
_REQUEST = "request"
_ANSWERS = "answers"
_STACKS = "stacks"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayRequest:
    """The data of `first` is run up to `repeats` times in a row, until a run does not pass."""

    first: CaseRun
    repeats: int

    @property
    def runs(self) -> tuple[CaseRun, ...]:
        return tuple(replace(self.first, repeat=repeat) for repeat in range(self.repeats))


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why the case cannot be run at all."""

    message: str
    exit_code: ExitCode


class ReplayFolder:
    """The files by which a replay and its process speak with each other."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.stacks = path / _STACKS

    def ask(self, request: ReplayRequest) -> None:
        (self.path / _REQUEST).write_bytes(pickle.dumps(request))

    def asked(self) -> ReplayRequest:
        request = pickle.loads((self.path / _REQUEST).read_bytes())
        assert isinstance(request, ReplayRequest)
        return request

    def answer(self, answer: CaseFinished | Refusal) -> None:
        with (self.path / _ANSWERS).open("ab") as file:
            pickle.dump(answer, file)

    def answers(self) -> Iterator[CaseFinished | Refusal]:
        path = self.path / _ANSWERS
        if not path.exists():
            return
        # one that is torn was not given
        with path.open("rb") as file, suppress(EOFError, pickle.UnpicklingError):
            while file.peek(1):
                yield pickle.load(file)


def replays(
    request: ReplayRequest, guard: Callable[[CaseRun], AbstractContextManager[None]]
) -> Iterator[CaseFinished]:
    """Run the case as `request` says, each run within `guard`. Raises CommandError if it cannot be
    run here."""
    select_interpreter()
    # kernels may only be imported once the interpreter is selected
    from loragate.run.trial import open_trial, run_case

    gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    for wanted in request.runs:
        # the subject may be unknown
        with usage_errors():
            trial = open_trial(wanted)
        if isinstance(trial, str):
            raise CommandError(f"{wanted.run_id} cannot run here: {trial}", ExitCode.INCOMPLETE)
        if wanted.repeat == 0:
            machine = trial.machine
            say(f"seed {wanted.seed} on {machine.device} ({machine.name})")
        with guard(wanted):
            finished = run_case(wanted, trial, worker=WORKER, gpu=gpu)
        yield finished
        if finished.verdict is not Verdict.PASS:
            return
        if wanted.repeat + 1 < request.repeats:
            say(f"repeat {wanted.repeat}: {finished.verdict.upper()}")


def _main(folder: ReplayFolder) -> None:
    stacks = open_crash_file(folder.stacks)
    try:
        for finished in replays(folder.asked(), lambda run: deadline(run.case.timeout_s, stacks)):
            folder.answer(finished)
    except CommandError as error:
        folder.answer(Refusal(str(error), error.exit_code))
    except Exception as error:
        # outside of the case: whoever wrote this code needs the stack
        traceback.print_exc()
        message = "".join(traceback.format_exception_only(error)).strip()
        folder.answer(Refusal(message, ExitCode.INFRASTRUCTURE))
    sys.stdout.flush()
    sys.stderr.flush()
    # a thread that the subject has left behind must not keep the process
    os._exit(ExitCode.OK.value)


if __name__ == "__main__":
    # pickled classes belong to the module, not to "__main__"
    from loragate.run import replay_process

    replay_process._main(replay_process.ReplayFolder(Path(sys.argv[1])))
