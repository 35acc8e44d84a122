"""`python -m loragate.scan.server SUBJECT...`: forks a process for each order that it reads.

It has imported torch, Triton, the harness and the subjects, so that a fresh process takes
milliseconds. No fork can use CUDA once it is initialised. If imports have done that, the server
starts again and leaves them to the forks.

One order a line, `{"id": ..., "order": path}` or `{"id": ..., "end": true}`; one answer a line,
when a process has ended: `{"id": ..., "status": ...}`.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import pickle
import select
import signal
import sys
import traceback
from contextlib import suppress
from pathlib import Path

from loragate.core.child_process import python_module
from loragate.core.machine import select_interpreter
from loragate.scan.imports import import_subjects
from loragate.scan.messages import Order

_WARM = (
    *("triton", "loragate.run.trial", "loragate.scan.child", "loragate.scan.bits"),
    "loragate.scan.paths",
)
_FEWER = "--fewer-imports"
_CUDA_ERROR_NOT_INITIALIZED = 3


def main(arguments: list[str]) -> int:
    select_interpreter()
    import torch

    subjects = [name for name in arguments if name != _FEWER]
    torch.set_num_threads(1)
    for name in _WARM:
        importlib.import_module(name)
    if _FEWER not in arguments:
        import_subjects(subjects)
        if _has_initialised_cuda():
            command = python_module("loragate.scan.server", _FEWER, *subjects)
            os.execv(command[0], command)
    if not torch.cuda.is_available():
        _load(subjects)
    # what is loaded by now stays loaded, so the garbage collector need not visit it in each fork
    gc.collect()
    gc.freeze()
    _answer(ready=True)
    _Server().serve()
    return 0


def _has_initialised_cuda() -> bool:
    """Whether anything in this process has, through torch or not. NVML does not count."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    current = ctypes.c_void_p()
    return bool(driver.cuCtxGetCurrent(ctypes.byref(current)) != _CUDA_ERROR_NOT_INITIALIZED)


def _load(subjects: list[str]) -> None:
    """Ask each subject what it can do here, which initialises CUDA where there is any."""
    from loragate.run.trial import load_subject

    for name in subjects:
        # the trials of a subject that cannot be loaded report the error
        with suppress(Exception):
            load_subject(name)


def _answer(**what: object) -> None:
    # one write, so that no other output comes between
    os.write(1, json.dumps(what).encode() + b"\n")


class _Server:
    def __init__(self) -> None:
        self._children: dict[int, int] = {}
        # a child that ends wakes the server up
        self._wake, woken = os.pipe()
        os.set_blocking(self._wake, False)
        os.set_blocking(woken, False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.set_wakeup_fd(woken)

    def serve(self) -> None:
        """Until there is no more to read."""
        buffer = b""
        while True:
            readable, _, _ = select.select([0, self._wake], [], [])
            if self._wake in readable:
                os.read(self._wake, 4096)
                self._reap()
            if 0 in readable:
                data = os.read(0, 65536)
                if not data:
                    return
                *lines, buffer = (buffer + data).split(b"\n")
                for line in lines:
                    self._obey(json.loads(line))

    def _obey(self, asked: dict[str, object]) -> None:
        if "end" in asked:
            for pid, number in self._children.items():
                if number == asked["id"]:
                    os.kill(pid, signal.SIGKILL)
            return
        pid = os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            _run(Path(str(asked["order"])))
        self._children[pid] = int(str(asked["id"]))

    def _reap(self) -> None:
        while self._children:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            number = self._children.pop(pid, None)
            if number is not None:
                _answer(id=number, status=os.waitstatus_to_exitcode(status))


def _run(path: Path) -> None:
    code = 1
    try:
        order = pickle.loads(path.read_bytes())
        assert isinstance(order, Order)
        from loragate.scan.child import run_order

        # what a subject prints is no answer
        os.dup2(2, 1)
        run_order(order)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        # not the server's own way to end
        os._exit(code)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
