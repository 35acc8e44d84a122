"""`python -m loragate.faults.server`: forks a planted process for each folder that it reads.

It has imported what every planted process needs and nothing of lorakernels, so that one starts at
once and still imports its own copy.
"""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path

from loragate.core.first_calls import import_for_first_calls
from loragate.core.fork_server import serve, settle
from loragate.core.machine import select_interpreter
from loragate.faults.child import run_order
from loragate.faults.planting import PACKAGE

_WARM = ("triton", "triton.language", "loragate.run.trial", "loragate.oracles")


def main() -> int:
    select_interpreter()
    import torch

    # several planted processes share the cores
    torch.set_num_threads(1)
    for name in _WARM:
        importlib.import_module(name)
    import_for_first_calls()
    assert PACKAGE not in sys.modules, "the server has imported the package under test"
    serve(_run)
    return 0


def _run(line: bytes) -> None:
    folder = Path(os.fsdecode(line).strip())
    # a kernel that was compiled for another fault must not be reused
    cache = str(folder / "cache")
    settle(log=str(folder / "log.txt"), folder=folder, packages=folder / "planted", cache=cache)
    run_order(folder / "order.json", folder / "transcript.jsonl")


if __name__ == "__main__":
    sys.exit(main())
