"""Processes that are forked from a server: how each ends, and that none costs another its own."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from loragate.core.child_process import ProcessPool
from loragate.core.verdict import Failure
from loragate.core.warm_server import ServerDied, WarmServer, environment_of_forks

# runs each line as Python
SERVER = """
from loragate.core.fork_server import serve

if __name__ == "__main__":
    serve(lambda line: exec(line.decode(), {}))
"""
PATIENCE_S = 60.0


@pytest.fixture
def server(tmp_path: Path) -> Iterator[WarmServer]:
    (tmp_path / "line_server.py").write_text(SERVER)
    environment = environment_of_forks()
    environment["PYTHONPATH"] = os.pathsep.join([str(tmp_path), environment["PYTHONPATH"]])
    processes = ProcessPool()
    server = WarmServer("line_server", processes, tmp_path / "log.txt", environment)
    yield server
    server.close()
    processes.close()


def run(server: WarmServer, line: str, patience_s: float = PATIENCE_S) -> Failure | None:
    return server.run(line.encode(), lambda: 0, patience_s)


@pytest.mark.parametrize(
    ("line", "failure"),
    [
        ("pass", None),
        ("import sys; sys.stderr.close(); sys.stdout.close()", None),
        ("raise ValueError('x')", Failure.CRASH),
        ("import sys; sys.exit(0)", Failure.CRASH),
        ("import os; os.abort()", Failure.CRASH),
    ],
)
def test_each_line_has_an_end_of_its_own(
    server: WarmServer, line: str, failure: Failure | None
) -> None:
    assert run(server, line) is failure
    assert run(server, "pass") is None


def test_lines_share_nothing(server: WarmServer, tmp_path: Path) -> None:
    assert (
        run(server, f"import os, sys; os.environ['A'] = sys.mark = 'x'; os.chdir('{tmp_path}')")
        is None
    )
    assert (
        run(server, "import os, sys; assert 'A' not in os.environ and not hasattr(sys, 'mark')")
        is None
    )
    assert run(server, f"import os; assert os.getcwd() != '{tmp_path}'") is None


def test_a_line_that_hangs_is_ended_and_the_next_one_gets_another_server(
    server: WarmServer, tmp_path: Path
) -> None:
    hangs = f"import os, time; open('{tmp_path}/pid', 'w').write(str(os.getpid())); time.sleep(600)"
    assert run(server, hangs, patience_s=1.0) is Failure.HANG
    assert is_gone(int((tmp_path / "pid").read_text()))
    assert run(server, "pass") is None


def test_what_a_line_leaves_behind_is_ended(server: WarmServer, tmp_path: Path) -> None:
    leaves = (
        "import subprocess, sys; child = subprocess.Popen([sys.executable, '-c', 'import time; "
        f"time.sleep(600)']); open('{tmp_path}/pid', 'w').write(str(child.pid))"
    )
    assert run(server, leaves) is None
    assert is_gone(int((tmp_path / "pid").read_text()))


def test_a_line_that_kills_its_group_kills_the_server_and_no_later_line(server: WarmServer) -> None:
    with pytest.raises(ServerDied, match="the server ended with SIGKILL"):
        run(server, "import os; os.killpg(0, 9)")
    assert run(server, "pass") is None


def test_a_server_that_was_killed_between_two_lines_is_started_again(server: WarmServer) -> None:
    assert run(server, "pass") is None
    (process,) = (p for p in psutil.Process().children() if "line_server" in p.cmdline())
    process.kill()
    process.wait()
    assert run(server, "pass") is None


def test_an_interruption_ends_what_runs(server: WarmServer, tmp_path: Path) -> None:
    def interrupt() -> int:
        if (tmp_path / "pid").exists():
            raise KeyboardInterrupt
        return 0

    hangs = f"import os, time; open('{tmp_path}/pid', 'w').write(str(os.getpid())); time.sleep(600)"
    with pytest.raises(KeyboardInterrupt):
        server.run(hangs.encode(), interrupt, PATIENCE_S)
    assert is_gone(int((tmp_path / "pid").read_text()))
    assert run(server, "pass") is None


def test_a_server_that_does_not_begin_says_why(server: WarmServer, tmp_path: Path) -> None:
    (tmp_path / "line_server.py").write_text("raise RuntimeError('no memory')")
    with pytest.raises(ServerDied, match=r"(?s)exit code 1.*RuntimeError: no memory"):
        run(server, "pass")


def is_gone(pid: int) -> bool:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        try:
            os.kill(pid, 0)
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return True
        except (ProcessLookupError, psutil.NoSuchProcess):
            return True
        time.sleep(0.05)
    return False
