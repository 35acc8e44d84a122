"""Processes of Python that begin with torch imported, forked instead of started.

Importing torch takes a second and a half of a core, and the tests start hundreds of commands,
sessions and workers. Where `Server.in_use` applies, `subprocess` has such commands of this
interpreter forked by a process that has imported torch and nothing of what is tested. The fork is
a child of whoever asked for it, with the number, streams, signals, session and exit status that a
started process has, and it starts its own children in the same way. What a fork cannot be - a
process with options of the interpreter, or with other variables that Python and torch read as they
start - is started as always.

`python preloaded.py FD` is the server. An order is JSON with the files of the fork's streams; the
answers are the number of the fork, and a word once it is a child of who asked.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import gc
import inspect
import io
import json
import multiprocessing.util
import os
import runpy
import signal
import site
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from types import ModuleType
from typing import Any, TextIO

_LARGEST = 1 << 20
_MOST_FILES = 32
_PDEATHSIG, _SUBREAPER = 1, 36
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
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
_prctl = ctypes.CDLL(None).prctl


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
                [sys.executable, __file__, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env=env,
                pass_fds=[theirs.fileno()],
            )
        return cls(ours, _read_at_start(env))

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
            and _arguments(command) is not None
            and self._has_read(os.environ if env is None else env)
        )

    def _has_read(self, env: Mapping[str, str]) -> bool:
        read = _read_at_start(env)
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
            "ignored": [n for n in _ENDING if signal.getsignal(n) == signal.SIG_IGN],
            "cores": sorted(os.sched_getaffinity(0)),
            "umask": _umask(),
        }
        if not os.path.isdir(order["cwd"]):
            return None
        with self._lock, suppress(OSError):
            # whose parent ends becomes a child of this process
            _prctl(_SUBREAPER, 1, 0, 0, 0)
            try:
                socket.send_fds(self._connection, [json.dumps(order).encode()], files)
                answer = self._connection.recv(100)
                if answer and self._connection.recv(100):
                    return int(answer)
            finally:
                _prctl(_SUBREAPER, 0, 0, 0, 0)
        return None


def _arguments(command: Sequence[Any]) -> list[str] | None:
    """What follows the interpreter, without -u and -B; None if that cannot be forked."""
    interpreter, *arguments = map(os.fspath, command)
    if interpreter != sys.executable:
        return None
    while arguments[:1] in (["-u"], ["-B"]):
        del arguments[0]
    is_plain = len(arguments) > 1 if arguments[:1] in (["-m"], ["-c"]) else bool(arguments)
    is_option = arguments[:1] not in (["-m"], ["-c"]) and arguments[0].startswith("-")
    return arguments if is_plain and not is_option else None


def _read_at_start(env: Mapping[str, str]) -> dict[str, str]:
    return {k: v for k, v in env.items() if k.startswith(_READ_AT_START) and k not in _FOLLOWED}


def _umask() -> int:
    mask = os.umask(0o22)
    os.umask(mask)
    return mask


def _ordered(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """An order, in the fork that has to carry it out; ends the process once nothing more is
    asked."""
    while True:
        data, files, _, _ = socket.recv_fds(connection, _LARGEST, _MOST_FILES)
        if not data:
            os._exit(0)
        between = os.fork()
        if between == 0:
            between = os.getpid()
            fork = os.fork()
            if fork:
                connection.send(str(fork).encode())
                # which makes the fork a child of who asked
                os._exit(0)
            while os.getppid() == between:
                time.sleep(0.0005)
            return json.loads(data), files
        for file in files:
            os.close(file)
        os.waitpid(between, 0)
        connection.send(b"adopted")


def _begin(order: dict[str, Any], files: Sequence[int]) -> None:
    """What is done between fork and exec."""
    for number in _ENDING:
        default = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
        signal.signal(number, signal.SIG_IGN if number in order["ignored"] else default)
    os.sched_setaffinity(0, order["cores"])
    os.umask(order["umask"])
    os.chdir(order["cwd"])
    # none of them has the number of another one
    least = 1 + max(order["numbers"])
    moved = [os.dup(file) if file >= least else _above(file, least) for file in files]
    for file in files:
        os.close(file)
    for file, number in zip(moved, order["numbers"], strict=True):
        os.dup2(file, number, inheritable=True)
        os.close(file)
    os.environ.clear()
    os.environ.update(order["env"])


def _above(file: int, least: int) -> int:
    import fcntl

    return fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, least)


def _become(order: dict[str, Any], base: Sequence[str]) -> None:
    """What Python does when it starts."""
    arguments = _arguments(order["command"])
    assert arguments is not None
    kind, rest = arguments[0], arguments[1:]
    first = {"-m": order["cwd"], "-c": ""}.get(kind, os.path.dirname(os.path.abspath(kind)))
    added = filter(None, order["env"].get("PYTHONPATH", "").split(os.pathsep))
    sys.path[:] = [first, *added, *base]
    sys.orig_argv[:] = order["command"]
    options = order["command"][1 : -len(arguments)]
    env = order["env"]
    sys.dont_write_bytecode = bool("-B" in options or env.get("PYTHONDONTWRITEBYTECODE"))
    if "-u" in options or env.get("PYTHONUNBUFFERED"):
        sys.stdout = _unbuffered(sys.stdout)
    tempfile.tempdir = None
    # it reads the environment
    sys.modules.pop("sitecustomize", None)
    site.execsitecustomize()
    if kind == "-m":
        sys.argv = list(rest)
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif kind == "-c":
        sys.argv = ["-c", *rest[1:]]
        main = sys.modules["__main__"] = ModuleType("__main__")
        exec(compile(rest[0], "<string>", "exec"), main.__dict__)
    else:
        sys.argv = arguments
        runpy.run_path(kind, run_name="__main__")


def _unbuffered(stream: TextIO) -> TextIO:
    # for the rest of the process
    raw = io.FileIO(stream.fileno(), "w", closefd=False)
    return io.TextIOWrapper(raw, encoding=stream.encoding, errors=stream.errors, write_through=True)


def _serve(connection: socket.socket, read: Mapping[str, str]) -> tuple[dict[str, Any], Server]:
    """Returns in forks alone: the order of each, and the server of its own."""
    while True:
        _prctl(_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        for number in _ENDING:
            signal.signal(number, signal.SIG_IGN)
        order, files = _ordered(connection)
        if order["session"]:
            os.setsid()
        elif order["group"] >= 0:
            os.setpgid(0, order["group"])
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        connection.close()
        if os.fork():
            theirs.close()
            server = Server(ours, read)
            _begin(order, files)
            return order, server
        # the server of that fork
        ours.close()
        for file in files:
            os.close(file)
        connection = theirs


def _end(code: int) -> None:
    """As Python ends, but that it takes no module of torch apart, which lasts longer than most
    commands."""
    threading._shutdown()
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except (OSError, ValueError, AttributeError):
        # Python has a code for streams that are lost
        sys.exit(code)
    os._exit(code & 0xFF)


def main() -> None:
    """As the docstring of the module says."""
    import torch

    loaded = {name.partition(".")[0] for name in sys.modules}
    assert not loaded & {"loragate", "lorakernels", "pytest", "triton"}, sorted(loaded)
    assert not torch.cuda.is_initialized()
    assert len(os.listdir("/proc/self/task")) == 1, "a fork has no threads"
    base, read = sys.path[1:], _read_at_start(os.environ)
    gc.collect()
    gc.freeze()
    order, server = _serve(socket.socket(fileno=int(sys.argv[1])), read)
    server.install()
    code: object = None
    try:
        _become(order, base)
    except SystemExit as end:
        code = end.code
        if not isinstance(code, int | None):
            raise
    _end(code or 0)


if __name__ == "__main__":
    main()
