"""`python -m loragate.run.opening_process FILE`: write the opening events of a run to FILE.

Planning asks what a subject supports, which means importing it and asking for the device. This
happens in a process of its own: whoever starts a run stays free of torch, and of a CUDA context
that would take memory from the workers. A session without workers has both anyway.
"""

from __future__ import annotations

import pickle
import sys
import tempfile
from pathlib import Path

from loragate.core.child_process import run_module, signal_name
from loragate.core.errors import CommandError, usage_errors
from loragate.core.verdict import ExitCode
from loragate.events.log import EventWriter, read_events
from loragate.events.model import Event
from loragate.run.opening import RunRequest, opening_events
from loragate.run.preflight import check_temporary_folder

# not `__name__`, which is "__main__" in the child
_MODULE = "loragate.run.opening_process"


class PlanningError(CommandError):
    """The run cannot be planned."""


def opening_events_here(request: RunRequest) -> tuple[Event, ...]:
    """`opening_events` in this process. Raises CommandError."""
    check_temporary_folder()
    with usage_errors():
        return tuple(opening_events(request))


def opening_events_of_child(request: RunRequest) -> tuple[Event, ...]:
    """`opening_events` in a child process. Raises PlanningError."""
    try:
        check_temporary_folder()
    except CommandError as error:
        raise PlanningError(str(error), error.exit_code) from error
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "opening.jsonl"
        child = run_module(_MODULE, str(answer), input=pickle.dumps(request))
        if child.returncode != 0 or not answer.exists():
            raise _problem(child.returncode, child.stderr.decode(errors="replace").strip())
        return read_events(answer).events


def _problem(code: int, message: str) -> PlanningError:
    """Why a child process has made no plan. message: what it said."""
    if message and code in (ExitCode.USAGE.value, ExitCode.INFRASTRUCTURE.value):
        # the message says all; python itself exits with 1
        return PlanningError(message, ExitCode(code))
    # a subject may end the process without a word, even with 0
    how = f"died of {signal_name(code)}" if code < 0 else f"ended with exit code {code} and no plan"
    text = f"the run cannot be planned on this machine: the process that plans it {how}"
    return PlanningError(f"{text}\n{message}".strip(), ExitCode.INFRASTRUCTURE)


def _main(answer: Path) -> int:
    request: RunRequest = pickle.load(sys.stdin.buffer)
    try:
        events = opening_events_here(request)
    except CommandError as error:
        print(error, file=sys.stderr)
        return error.exit_code.value
    with EventWriter(answer, run=request.run) as writer:
        for event in events:
            writer.write(event)
    return ExitCode.OK.value


if __name__ == "__main__":
    sys.exit(_main(Path(sys.argv[1])))
