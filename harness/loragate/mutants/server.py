"""`python -m loragate.mutants.server`: forks a process for each order that it reads.

It has imported what every mutant needs - torch, Triton, the harness, pytest - and nothing of
lorakernels, so that a mutant starts at once and still imports its own copy. One order a line, one
answer a line: how the process ended.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import sys
import traceback
from contextlib import suppress

import psutil

from loragate.core.checkout import project_root
from loragate.core.machine import select_interpreter
from loragate.faults.planting import PACKAGE
from loragate.matrix.ids import run_id
from loragate.matrix.load import default_files, load_cases
from loragate.mutants.child import Cases, limit_memory, run_order
from loragate.mutants.planting import SUBJECT
from loragate.mutants.units import from_json

_WARM = ("triton", "triton.language", "loragate.run.trial", "loragate.plugin", "hypothesis")
# some host tests need them, and a checkout works without them
_OPTIONAL = ("peft", "transformers")


def main() -> int:
    select_interpreter()
    import torch

    torch.set_num_threads(1)
    for name in _WARM:
        importlib.import_module(name)
    for name in _OPTIONAL:
        with suppress(ImportError):
            importlib.import_module(name)
    cases = {run_id(SUBJECT, c): c for c in load_cases(default_files(project_root()))}
    assert PACKAGE not in sys.modules, "the server has imported the package under test"
    limited = not torch.cuda.is_available() or bool(os.environ.get("TRITON_INTERPRET"))
    # what is loaded by now stays loaded, so the garbage collector need not visit it in each fork
    gc.collect()
    gc.freeze()
    answer({"ready": True})
    for line in sys.stdin.buffer:
        answer({"status": _fork(line, cases, limited=limited)})
    return 0


def answer(what: dict[str, object]) -> None:
    print(json.dumps(what), flush=True)


def _fork(line: bytes, cases: Cases, *, limited: bool) -> int:
    """The status of the process as `waitpid` gives it."""
    process = os.fork()
    if process == 0:
        _run(line, cases, limited=limited)
    _, status = os.waitpid(process, 0)
    _end_others()
    return os.waitstatus_to_exitcode(status)


def _run(line: bytes, cases: Cases, *, limited: bool) -> None:
    code = 1
    try:
        if limited:
            limit_memory()
        run_order(from_json(line), cases)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        # not the server's own way to end
        os._exit(code)


def _end_others() -> None:
    """Kill what the process of a mutant has left behind in the group of this one."""
    group = os.getpgid(0)
    for process in psutil.process_iter():
        with suppress(psutil.Error, ProcessLookupError, PermissionError):
            if process.pid != os.getpid() and os.getpgid(process.pid) == group:
                process.kill()


if __name__ == "__main__":
    sys.exit(main())
