"""A command that is interrupted ends the planted processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import pytest

from loragate.core.verdict import ExitCode
from loragate.faults.corpus import CONTROLS

pytestmark = pytest.mark.usefixtures("heeded_signals", "preloaded")

# they run long enough to be interrupted
PLANTED = [control.name for control in CONTROLS[:2]]


def _started_by(parent: int) -> list[int]:
    """Running processes that `parent` started."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        # one that ends meanwhile is gone
        with suppress(OSError):
            state, ppid = path.read_text().rpartition(")")[2].split()[:2]
            if int(ppid) == parent and state != "Z":
                found.append(int(path.parent.name))
    return found


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _is_server(pid: int) -> bool:
    """Each leads a group, as the process does that ends them if the command is killed."""
    is_guard = b"group_guard" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return os.getpgid(pid) == pid and not is_guard


def _until(happened: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 60
    while not happened() and time.monotonic() < deadline:
        time.sleep(0.02)
    return happened()


# it hangs, with a deadline far beyond the time of a test
HANGING = """
from loragate.faults.model import Edit, Fault, GateItem, Group, Killer, Part
from loragate.faults.order import Suite
from loragate.faults.runner import Setup, run_all
from loragate.core.signals import ended_by_signals

test = "tests/kernels/test_tp_partition.py::test_cuts_of_a_padded_width_tile_the_unpadded_one"
start = "    size = padded // tp_size\\n"
hang = "    __import__('time').sleep(600)\\n"
fault = Fault(
    name="a-fault",
    edit=Edit("lorakernels.layers.partition", start, hang + start),
    group=Group.LAYER,
    source="own",
    why="It hangs.",
    killers=(Killer(GateItem(Part.HOST_TEST, test)),),
)
try:
    with ended_by_signals():
        print(list(run_all([fault, fault, fault], [Suite.GATE], Setup(jobs=2, deadline_s=600))))
except KeyboardInterrupt:
    print("interrupted")
"""


def _interrupted(
    arguments: Sequence[str], number: signal.Signals, folder: Path
) -> tuple[int, str, list[int]]:
    """Send a signal to a command that is running two planted processes. Returns its exit code, its
    output, and which of them and of their servers outlived it."""
    command = subprocess.Popen(
        [sys.executable, *arguments],
        env=os.environ | {"TMPDIR": str(folder)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert _until(lambda: len(list(folder.glob("*/transcript.jsonl"))) == 2)
    servers = [pid for pid in _started_by(command.pid) if _is_server(pid)]
    assert len(servers) == 2
    children = servers + [pid for server in servers for pid in _started_by(server)]
    assert len(children) >= 4
    try:
        command.send_signal(number)
        said, _ = command.communicate(timeout=60)
        return command.returncode, said, [child for child in children if _is_alive(child)]
    finally:
        command.kill()
        for server in servers:
            with suppress(ProcessLookupError):
                os.killpg(server, signal.SIGKILL)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_ends_the_planted_processes_and_exits_as_incomplete(
    number: signal.Signals, tmp_path: Path
) -> None:
    arguments = ["-m", "loragate", "faults", "--only", *PLANTED]
    code, said, alive = _interrupted(arguments, number, tmp_path)
    assert (code, alive) == (ExitCode.INCOMPLETE, []), said
    assert said.endswith("loragate faults: interrupted\n")
    assert not list(tmp_path.glob("loragate-fault-*"))


def test_a_hanging_planted_process_is_not_waited_for(tmp_path: Path) -> None:
    _, said, alive = _interrupted(["-c", HANGING], signal.SIGTERM, tmp_path)
    assert (said, alive) == ("interrupted\n", [])
    assert not list(tmp_path.glob("loragate-fault-*"))
