"""`python forking.py FD`: a process that has imported torch, and forks processes of Python.

An order is JSON with the files of the fork's streams; the answers are the number of the fork, and a
word once it is a child of who asked, in its own session or group and with its own signals.
preloaded.py sends orders.
"""

from __future__ import annotations

import atexit
import fcntl
import gc
import io
import json
import os
import runpy
import signal
import site
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any, TextIO

from preloaded import (
    ENDING,
    LARGEST,
    MOST_FILES,
    PDEATHSIG,
    Server,
    arguments_of,
    prctl,
    read_at_start,
)


def _ordered(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """An order, in the fork that has to carry it out; ends the process once nothing more is
    asked."""
    while True:
        data, files, _, _ = socket.recv_fds(connection, LARGEST, MOST_FILES)
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


def _begin(order: dict[str, Any]) -> None:
    """What is done between fork and exec, but for the files."""
    for number in ENDING:
        default = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
        signal.signal(number, signal.SIG_IGN if number in order["ignored"] else default)
    os.sched_setaffinity(0, order["cores"])
    os.umask(order["umask"])
    os.chdir(order["cwd"])
    os.environ.clear()
    os.environ.update(order["env"])


def _take(files: Sequence[int], order: dict[str, Any]) -> None:
    """The streams, and other files that are passed on."""
    # none of them has the number of another one
    least = 1 + max(order["numbers"])
    moved = [os.dup(file) if file >= least else _above(file, least) for file in files]
    for file in files:
        os.close(file)
    for file, number in zip(moved, order["numbers"], strict=True):
        os.dup2(file, number, inheritable=True)
        os.close(file)


def _above(file: int, least: int) -> int:
    return fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, least)


def _become(order: dict[str, Any], base: Sequence[str]) -> None:
    """What Python does when it starts."""
    arguments = arguments_of(order["command"])
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
        prctl(PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        for number in ENDING:
            signal.signal(number, signal.SIG_IGN)
        order, files = _ordered(connection)
        if order["session"]:
            os.setsid()
        elif order["group"] >= 0:
            os.setpgid(0, order["group"])
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if os.fork():
            theirs.close()
            server = Server(ours, read)
            try:
                _begin(order)
            finally:
                # not before: who asked may send a signal at once, to the process or to its group
                connection.send(b"ready")
            connection.close()
            _take(files, order)
            return order, server
        # the server of that fork
        ours.close()
        connection.close()
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
    """See the docstring of the module."""
    import torch

    loaded = {name.partition(".")[0] for name in sys.modules}
    assert not loaded & {"loragate", "lorakernels", "pytest", "triton"}, sorted(loaded)
    assert not torch.cuda.is_initialized()
    assert len(os.listdir("/proc/self/task")) == 1, "a fork has no threads"
    base, read = sys.path[1:], read_at_start(os.environ)
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
