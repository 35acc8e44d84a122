"""`python preloaded_server.py FD`: forks a Python for each order that it receives.

Importing torch takes seconds, and dozens of tests start a command or a session that runs in one
process. A fork begins as such a process does, except that torch is imported: nothing of what is
tested is.

An order is JSON, `{"argv": ["-m", MODULE, ...], "cwd": ..., "env": {...}}`, with the file of its
output; the answers are the number of the process, and its exit status.
"""

from __future__ import annotations

import json
import os
import runpy
import site
import socket
import sys
from typing import Any

import torch

_LARGEST = 1 << 20


def _serve(connection: socket.socket) -> dict[str, Any] | None:
    """None once nothing more is asked; an order in the fork that has to carry it out."""
    while True:
        data, files, _, _ = socket.recv_fds(connection, _LARGEST, 1)
        if not data:
            return None
        pid = os.fork()
        if pid == 0:
            connection.close()
            for number in (1, 2):
                os.dup2(files[0], number)
            return dict(json.loads(data))
        os.close(files[0])
        connection.send(json.dumps(pid).encode())
        _, status = os.waitpid(pid, 0)
        connection.send(json.dumps(os.waitstatus_to_exitcode(status)).encode())


def _become(order: dict[str, Any]) -> None:
    """The rest of what `python -m` does."""
    ours = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    os.environ.clear()
    os.environ.update(order["env"])
    os.chdir(order["cwd"])
    added = filter(None, order["env"].get("PYTHONPATH", "").split(os.pathsep))
    sys.path[:] = [order["cwd"], *added, *(path for path in sys.path[1:] if path not in ours)]
    # it reads the environment
    sys.modules.pop("sitecustomize", None)
    site.execsitecustomize()
    _, module, *arguments = order["argv"]
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def main() -> None:
    """As the docstring of the module says."""
    loaded = {name.partition(".")[0] for name in sys.modules}
    assert not loaded & {"loragate", "lorakernels", "pytest", "triton"}, sorted(loaded)
    assert not torch.cuda.is_initialized()
    order = _serve(socket.socket(fileno=int(sys.argv[1])))
    if order is not None:
        _become(order)


if __name__ == "__main__":
    main()
