"""Processes of Python that begin with torch imported, forked instead of started.

Importing torch takes a second and a half of a core, and the tests start hundreds of commands,
sessions and workers. Where `Server.in_use` applies, `subprocess` has such commands of this
interpreter forked by a process that has imported torch and nothing of what is tested. The fork is
a child of whoever asked for it, with the number, streams, signals, session and exit status that a
started process has, and it starts its own children in the same way. What a fork cannot be - a
process with options of the interpreter, or with other variables that Python and torch read as they
start - is started as always.

This is the side of whoever asks; forking.py is the process that forks.
"""

from __future__ import annotations

import ctypes
import functools
import inspect
import json
import multiprocessing.util
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

_SERVER = Path(__file__).with_name("forking.py")
# of an order, in bytes
LARGEST = 1 << 20
MOST_FILES = 32
PDEATHSIG, _SUBREAPER = 1, 36
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# read as Python, torch and their libraries start
_READ_AT_START = ("PYTHON", "OMP_", "MKL_", "KMP_", "TORCH", "PYTORCH_", "OPENBLAS_", "LD_")
# but for those that a fork follows, or that are read later
_FOLLOWED = {
    *("PYTHONPATH", "PYTHONUNBUFFERED", "PYTHONDONTWRITEBYTECODE"),
    *("TORCHINDUCTOR_CACHE_DIR", "PYTORCH_NVML_BASED_CUDA_CHECK"),
}
# several processes share the cores
_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")

# also in a fork that imports this module once more
_START = inspect.unwrap(subprocess.Popen._execute_child)
_SPAWN = inspect.unwrap(multiprocessing.util.spawnv_passfds)
# what a process has that is started without options
_PLAIN = {
    **dict.fromkeys(("env", "cwd", "executable", "preexec_fn", "shell", "gid", "gids", "uid")),
    **dict.fromkeys(("p2cread", "c2pwrite", "errwrite", "umask", "process_group"), -1),
    "start_new_session": False,
}
prctl = ctypes.CDLL(None).prctl


@contextmanager
def started_anew() -> Iterator[None]:
    """Within `Server.in_use`: all processes are started."""
    with _starting_by(_START, _SPAWN):
        yield


@contextmanager
def _starting_by(execute: Callable[..., None], spawn: Callable[..., int]) -> Iterator[None]:
    before = subprocess.Popen._execute_child, multiprocessing.util.spawnv_passfds
    subprocess.Popen._execute_child, multiprocessing.util.spawnv_passfds = execute, spawn
    try:
        yield
    finally:
        subprocess.Popen._execute_child, multiprocessing.util.spawnv_passfds = before


class Server:
    """The side of whoever asks. Forks of this process have none."""

    def __init__(self, connection: socket.socket, read: Mapping[str, str]) -> None:
        """`read`: what the process that forks has read as it started."""
        self._connection = connection
        self._read = read
        self._owner = os.getpid()
        self._lock = threading.Lock()

    @classmethod
    def start(cls) -> Server:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            kept = {k: v for k, v in os.environ.items() if k not in _FOLLOWED}
            env = kept | _ONE_THREAD
            subprocess.Popen(
                [sys.executable, str(_SERVER), str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env=env,
                pass_fds=[theirs.fileno()],
            )
        return cls(ours, read_at_start(env))

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Within, the processes that `subprocess` and `multiprocessing` start are forked if they
        can be."""
        with _starting_by(self._executor(), self._spawner()):
            yield

    def install(self) -> None:
        subprocess.Popen._execute_child = self._executor()
        multiprocessing.util.spawnv_passfds = self._spawner()

    def _spawner(self) -> Callable[..., int]:
        @functools.wraps(_SPAWN)
        def spawn(path: str, command: Sequence[str], files: Sequence[int]) -> int:
            pid = None
            # not what watches over the resources of all
            if any("spawn_main" in os.fsdecode(part) for part in command):
                wanted = {"args": list(map(os.fsdecode, command)), "pass_fds": files, **_PLAIN}
                pid = self._forked(wanted) if self._can_fork(wanted) else None
            return _SPAWN(path, command, files) if pid is None else pid

        return spawn

    def _executor(self) -> Callable[..., None]:
        names = _START.__code__.co_varnames[1 : _START.__code__.co_argcount]

        @functools.wraps(_START)
        def execute(process: subprocess.Popen[Any], *given: Any) -> None:
            wanted = dict(zip(names, given, strict=True))
            pid = self._forked(wanted) if self._can_fork(wanted) else None
            if pid is None:
                _START(process, *given)
                return
            process.pid = pid
            process._child_created = True
            ends = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
            process._close_pipe_fds(*(wanted[end] for end in ends))

        return execute

    def _can_fork(self, wanted: Mapping[str, Any]) -> bool:
        command, env = wanted["args"], wanted["env"]
        return (
            os.getpid() == self._owner
            and not isinstance(command, str | bytes | os.PathLike)
            and not any(wanted[name] for name in ("preexec_fn", "shell", "gid", "gids", "uid"))
            and wanted["executable"] in (None, command[0])
            and wanted["umask"] < 0
            and arguments_of(command) is not None
            and self._has_read(os.environ if env is None else env)
        )

    def _has_read(self, env: Mapping[str, str]) -> bool:
        read = read_at_start(env)
        return all(
            read.get(name, _ONE_THREAD.get(name)) == self._read.get(name)
            for name in read.keys() | self._read.keys()
        )

    def _forked(self, wanted: Mapping[str, Any]) -> int | None:
        env = os.environ if wanted["env"] is None else wanted["env"]
        streams = [wanted[end] for end in ("p2cread", "c2pwrite", "errwrite")]
        numbers = [0, 1, 2, *wanted["pass_fds"]]
        files = [n if n >= 0 else k for k, n in enumerate(streams)] + numbers[3:]
        order = {
            "command": [os.fspath(part) for part in wanted["args"]],
            "numbers": numbers,
            "env": {os.fsdecode(k): os.fsdecode(v) for k, v in env.items()},
            "cwd": os.fsdecode(wanted["cwd"] or os.getcwd()),
            "session": wanted["start_new_session"],
            "group": max(wanted["process_group"], -1),
            "parent": os.getpid(),
            "ignored": [n for n in ENDING if signal.getsignal(n) == signal.SIG_IGN],
            "cores": sorted(os.sched_getaffinity(0)),
            "umask": _umask(),
        }
        if not os.path.isdir(order["cwd"]):
            return None
        with self._lock, suppress(OSError):
            # whose parent ends becomes a child of this process
            prctl(_SUBREAPER, 1, 0, 0, 0)
            try:
                socket.send_fds(self._connection, [json.dumps(order).encode()], files)
                answer = self._connection.recv(100)
                if answer and self._connection.recv(100):
                    return int(answer)
            finally:
                prctl(_SUBREAPER, 0, 0, 0, 0)
        return None


def arguments_of(command: Sequence[Any]) -> list[str] | None:
    """What follows the interpreter, without -u and -B; None if that cannot be forked."""
    interpreter, *arguments = map(os.fspath, command)
    if interpreter != sys.executable:
        return None
    while arguments[:1] in (["-u"], ["-B"]):
        del arguments[0]
    is_plain = len(arguments) > 1 if arguments[:1] in (["-m"], ["-c"]) else bool(arguments)
    is_option = arguments[:1] not in (["-m"], ["-c"]) and arguments[0].startswith("-")
    return arguments if is_plain and not is_option else None


def read_at_start(env: Mapping[str, str]) -> dict[str, str]:
    return {k: v for k, v in env.items() if k.startswith(_READ_AT_START) and k not in _FOLLOWED}


def _umask() -> int:
    mask = os.umask(0o22)
    os.umask(mask)
    return mask
