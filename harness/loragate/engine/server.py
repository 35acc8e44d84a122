"""`python -m loragate.engine.server MODULE CONTROL`: the process that engines are forked from.

It has imported the module of its engines, and what that preloads, which takes a package such as
vLLM a third of the time of a trial. Each message in its socket is the target of an engine, with a
channel and a log for it; the answer is how the engine ended. It ends when nobody is left at the
other end.
"""

from __future__ import annotations

import os
import socket
import sys
import traceback
from functools import partial
from importlib import import_module

from loragate.core.fork_server import forked, prepare_for_forks
from loragate.core.gpus import cuda_is_initialised
from loragate.engine import serve

_TARGET_BYTES = 1 << 12


def main(module: str, control: int) -> None:
    _preload(module)
    with socket.socket(fileno=control) as orders:
        # a fork cannot use a driver that its parent has initialised
        is_only_one = cuda_is_initialised()
        prepare_for_forks()
        while True:
            target, handles, _, _ = socket.recv_fds(orders, _TARGET_BYTES, 2)
            if not target:
                return
            channel, log = handles
            if is_only_one:
                return _serve(target.decode(), channel, log)
            engine = partial(_serve_without, orders, target.decode(), channel, log)
            orders.sendall(b"%d" % forked(engine, gives=handles))


def _preload(module: str) -> None:
    """Whatever fails here fails again, and is told, where an engine is made."""
    try:
        preload = getattr(import_module(module), "preload", None)
        if preload is not None:
            preload()
    except Exception:
        traceback.print_exc()


def _serve_without(orders: socket.socket, target: str, channel: int, log: int) -> None:
    # the server's own
    orders.close()
    _serve(target, channel, log)


def _serve(target: str, channel: int, log: int) -> None:
    os.dup2(log, 1)
    os.dup2(log, 2)
    serve.main(target, channel)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
