"""A process that is forked with torch imported is, for everybody else, one that was started."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
from preloaded import Server, started_anew

HAS_TORCH = "import sys; print('torch' in sys.modules)"
SURROUNDINGS = """
import json, os, signal, sys, tempfile
print(json.dumps({
    "argv": sys.argv, "orig_argv": sys.orig_argv, "path": sys.path, "name": __name__,
    "cwd": os.getcwd(), "environ": sorted(os.environ.items()), "parent": os.getppid(),
    "group": os.getpgid(0) == os.getpid(), "session": os.getsid(0) == os.getpid(),
    "cores": sorted(os.sched_getaffinity(0)), "umask": os.umask(0), "folder": tempfile.gettempdir(),
    "bytecode": sys.dont_write_bytecode, "read": sys.stdin.read(),
    "handlers": [str(signal.getsignal(n)) for n in (2, 1, 13, 15)],
    "files": sorted(int(n) for n in os.listdir("/proc/self/fd") if int(n) < 3),
}))
print("said aside", file=sys.stderr)
"""
ENDS = {
    "falls off its end": "print('said')",
    "a code": "import sys; sys.exit(7)",
    "a message": "import sys; sys.exit('not so')",
    "an error": "raise ValueError('wrong')",
    "a signal": "import os, signal; os.kill(os.getpid(), signal.SIGTERM)",
    "ctrl-c": "import os, signal; os.kill(os.getpid(), signal.SIGINT); import time; time.sleep(60)",
    "atexit": "import atexit; atexit.register(print, 'at the end')",
    "a thread": "import threading, time\n"
    "threading.Thread(target=lambda: (time.sleep(0.1), print('in a thread'))).start()",
    "at once": "import os; print('lost'); os._exit(3)",
}

Run = Callable[..., "subprocess.CompletedProcess[str]"]


def run(*arguments: str, **options: object) -> subprocess.CompletedProcess[str]:
    options = {"capture_output": True, "text": True, "timeout": 120, "input": "", **options}
    return subprocess.run([sys.executable, *arguments], check=False, **options)


@pytest.fixture
def both(preloaded_server: Server) -> Callable[..., tuple[object, object]]:
    """What a command gives if it is started, and if it is forked."""

    def both(*arguments: str, **options: object) -> tuple[object, object]:
        # without what readline has put beside it
        options = {"env": dict(os.environ), **options}

        def found() -> object:
            done = run(*arguments, **options)
            # a fork has more frames below
            return done.returncode, done.stdout, done.stderr.splitlines()[-1:]

        with started_anew():
            started = found()
        with preloaded_server.in_use():
            return started, found()

    return both


@pytest.fixture
def script(tmp_path: Path) -> Path:
    (tmp_path / "surroundings.py").write_text(SURROUNDINGS)
    return tmp_path / "surroundings.py"


def test_torch_is_there_for_what_is_forked_and_for_what_that_starts(preloaded: None) -> None:
    assert run("-c", HAS_TORCH).stdout == "True\n"
    inner = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {HAS_TORCH!r}])"
    assert run("-c", inner).stdout == "True\n"


def test_what_a_fork_cannot_be_is_started(preloaded: None) -> None:
    assert run("-I", "-c", HAS_TORCH).stdout == "False\n"
    for changed in ({"OMP_NUM_THREADS": "3"}, {"PYTHONHASHSEED": "1"}):
        assert run("-c", HAS_TORCH, env={**os.environ, **changed}).stdout == "False\n"


@pytest.mark.parametrize("how", ["-m", "-c", "script"])
@pytest.mark.parametrize(
    "options",
    [{}, {"start_new_session": True}, {"process_group": 0}, {"umask": 0o77}, {"input": "text"}],
    ids=str,
)
def test_it_finds_the_surroundings_that_it_would_have_found(
    how: str, options: dict[str, object], script: Path, both: Callable[..., tuple[object, object]]
) -> None:
    command = {"-m": ["-m", "surroundings"], "-c": ["-c", SURROUNDINGS], "script": [str(script)]}
    env = {**os.environ, "TMPDIR": str(script.parent), "ONE_MORE": "x"}
    env |= {"PYTHONPATH": "/somewhere:/else", "PYTHONDONTWRITEBYTECODE": "1"}
    given = {"env": env, "cwd": script.parent, **options}
    started, forked = both(*command[how], "one", "--two", **given)
    assert forked == started


def test_it_has_the_cores_and_ignores_the_signals_of_who_starts_it(
    script: Path, both: Callable[..., tuple[object, object]], heeded_signals: None
) -> None:
    cores = os.sched_getaffinity(0)
    ignored = signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.sched_setaffinity(0, {min(cores)})
    try:
        started, forked = both(str(script))
    finally:
        os.sched_setaffinity(0, cores)
        signal.signal(signal.SIGINT, ignored)
    assert forked == started


@pytest.mark.parametrize("code", ENDS.values(), ids=ENDS)
def test_it_ends_as_it_would_have_ended(
    code: str, both: Callable[..., tuple[object, object]], heeded_signals: None
) -> None:
    started, forked = both("-c", code)
    assert forked == started


def test_a_pool_of_processes_has_torch_as_well(preloaded: None) -> None:
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, context) as pool:
        assert pool.submit(eval, "'torch' in __import__('sys').modules").result()
        assert pool.submit(os.getppid).result() == os.getpid()


def test_files_are_passed_on_with_their_numbers(preloaded: None) -> None:
    read, write = os.pipe()
    done = run("-c", f"import os; os.write({write}, b'through it')", pass_fds=[write])
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        # to the end: nobody else holds it
        assert (done.returncode, pipe.read()) == (0, b"through it")


def test_its_pipes_end_with_it_and_not_with_its_server(preloaded: None) -> None:
    code = "import os, time; os.close(1); os.close(2); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.read() == b""
        child.kill()
    assert child.returncode == -signal.SIGKILL


def test_its_server_ends_with_it(preloaded: None) -> None:
    code = (
        "import os, time\n"
        "print(*open(f'/proc/self/task/{os.getpid()}/children').read().split(), flush=True)\n"
        "time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        (server,) = child.stdout.readline().split()
        child.kill()
    deadline = time.monotonic() + 60
    while _is_alive(int(server)):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_fork_can_be_ended_through_its_session_as_soon_as_it_was_started(
    preloaded_server: Server, number: signal.Signals
) -> None:
    sleep = [sys.executable, "-c", "import time; time.sleep(60)"]
    with preloaded_server.in_use():
        for _ in range(30):
            with subprocess.Popen(sleep, start_new_session=True) as process:
                os.killpg(process.pid, number)
                assert process.wait(timeout=20) == -number
