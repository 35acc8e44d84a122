"""A process that has imported what many others need, and forks one of them for each line that it
reads. One answer a line: how the fork ended.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path

import psutil


def serve(run: Callable[[bytes], None]) -> None:
    """Fork for each line of the input, and `run` it there, where whatever it raises is a failure.
    Call it with everything imported, in a process that leads its group."""
    prepare_for_forks()
    _answer({"ready": True})
    for line in sys.stdin.buffer:
        _answer({"status": forked(partial(run, line))})


def prepare_for_forks() -> None:
    """Call it with everything imported, in a process that leads its group."""
    assert os.getpgid(0) == os.getpid(), "what forks leave behind is killed by the group"
    # what is loaded by now stays loaded, so the garbage collector need not visit it in each fork
    gc.collect()
    gc.freeze()


def forked(run: Callable[[], None], *, gives: Iterable[int] = ()) -> int:
    """Call `run` in a fork, where whatever it raises is a failure. Returns the status of the fork,
    negative for a signal, when it and all that it has started have ended. gives: files that only
    the fork keeps open."""
    process = os.fork()
    if process == 0:
        _run(run)
    for handle in gives:
        os.close(handle)
    _, status = os.waitpid(process, 0)
    _end_others()
    return os.waitstatus_to_exitcode(status)


def _answer(what: dict[str, object]) -> None:
    print(json.dumps(what), flush=True)


def _run(run: Callable[[], None]) -> None:
    code = 1
    try:
        run()
        code = 0
    except BaseException as error:
        with suppress(Exception):
            _show(error)
    finally:
        # it may have closed its streams
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):
                stream.flush()
        # not the server's own way to end
        os._exit(code)


def _show(error: BaseException) -> None:
    if isinstance(error, SystemExit) and isinstance(error.code, str):
        # as Python ends with such a message
        print(error.code, file=sys.stderr)
    else:
        traceback.print_exception(error)


def _end_others() -> None:
    """Kill what a fork has left behind in the group of this process."""
    group = os.getpgid(0)
    for process in psutil.process_iter():
        with suppress(psutil.Error, ProcessLookupError, PermissionError):
            if process.pid != os.getpid() and os.getpgid(process.pid) == group:
                process.kill()


def settle(*, log: str, folder: Path, packages: Path, cache: str) -> None:
    """Make this fork, and what it starts, write to `log` and read nothing, run in `folder`, find
    `packages` before those that are installed, and keep compiled kernels in `cache`."""
    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    os.chdir(folder)
    sys.path.insert(0, str(packages))
    os.environ["PYTHONPATH"] = os.pathsep.join([str(packages), os.environ.get("PYTHONPATH", "")])
    os.environ["TRITON_CACHE_DIR"] = cache
