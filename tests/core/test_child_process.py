"""Modules that run to their end, and process groups that are ended together."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from loragate.core.child_process import PoolClosed, ProcessPool, run_module, signal_name
from loragate.core.group_guard import groups_left

SLEEP = "import time; time.sleep(600)"
# starts a grandchild, prints its number, and sleeps or ends
WITH_GRANDCHILD = f"""
import subprocess, sys
print(subprocess.Popen([sys.executable, "-c", "{SLEEP}"]).pid, flush=True)
"""


def test_a_module_gets_its_input_and_arguments_and_returns_what_it_printed() -> None:
    done = run_module("json.tool", "--compact", input=b'{"a": 1}')
    assert (done.returncode, done.stdout) == (0, b'{"a":1}\n')


def test_a_module_that_fails_is_reported_by_its_exit_code() -> None:
    done = run_module("json.tool", input=b"no json")
    assert done.returncode == 1
    assert done.stderr


def test_a_module_that_takes_too_long_is_killed(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(SLEEP)
    with pytest.raises(subprocess.TimeoutExpired):
        run_module("slow", env={"PYTHONPATH": str(tmp_path)}, timeout=0.5)


def test_ending_a_child_ends_what_it_has_started() -> None:
    pool = ProcessPool()
    child = pool.start([sys.executable, "-c", WITH_GRANDCHILD], stdout=subprocess.PIPE)
    assert child.stdout is not None
    with child.stdout:
        grandchild = int(child.stdout.readline())
    child.wait(30)
    pool.end(child)
    assert ends(grandchild)


def test_a_closed_pool_has_killed_all_and_starts_no_more() -> None:
    pool = ProcessPool()
    children = [pool.start([sys.executable, "-c", SLEEP]) for _ in range(2)]
    pool.close()
    assert all(child.wait(30) < 0 for child in children)
    with pytest.raises(PoolClosed):
        pool.start([sys.executable, "-c", SLEEP])


def ends(pid: int) -> bool:
    """Whether a process is gone, or a zombie that waits for its parent, within 30 s."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.02)
    return False


OWNER = f"""
import os, signal, sys, time
from pathlib import Path
from loragate.core.child_process import ProcessPool, Watch
sleeping = [sys.executable, "-c", "{SLEEP}"]
pool = ProcessPool()
ended = pool.start([sys.executable, "-c", ""])
pool.end(ended)
print(pool.start(sleeping).pid, flush=True)
child = [sys.executable, "-c", {WITH_GRANDCHILD!r} + "import time; time.sleep(600)"]
watch = Watch(patience_s=60, tick=lambda: False)
watch.start(child, log=Path(sys.argv[1]))
watch.start(child, log=Path(sys.argv[2]))
watch.wait()
"""


def test_sigkill_of_a_process_ends_all_that_it_watches_and_all_that_these_have_started(
    tmp_path: Path,
) -> None:
    logs = [tmp_path / "one.log", tmp_path / "two.log"]
    command = [sys.executable, "-c", OWNER, *map(str, logs)]
    owner = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert owner.stdout is not None
    with owner.stdout:
        pooled = int(owner.stdout.readline())
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline and not all(
        log.exists() and log.read_text().endswith("\n") for log in logs
    ):
        time.sleep(0.02)
    grandchildren = [int(log.read_text()) for log in logs]
    assert all(map(psutil.pid_exists, grandchildren))
    owner.kill()
    owner.wait()
    assert all(map(ends, [pooled, *grandchildren]))


def test_a_group_that_has_ended_is_not_killed_with_its_owner() -> None:
    assert groups_left([b"+1\n", b"+2\n", b"-1\n", b"+3"]) == {2}


def test_a_signal_without_a_name_is_told_by_its_number() -> None:
    assert (signal_name(-11), signal_name(-36)) == ("SIGSEGV", "signal 36")
