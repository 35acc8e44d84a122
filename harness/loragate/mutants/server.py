"""`python -m loragate.mutants.server`: forks a process for each order that it reads.

It has imported what every mutant needs - torch, Triton, the harness, pytest - and nothing of
lorakernels, so that a mutant starts at once and still imports its own copy.
"""

from __future__ import annotations

import importlib
import os
import sys
from contextlib import suppress

from loragate.core.checkout import project_root
from loragate.core.first_calls import import_for_first_calls
from loragate.core.fork_server import serve
from loragate.core.machine import select_interpreter
from loragate.faults.planting import PACKAGE
from loragate.matrix.ids import run_id
from loragate.matrix.load import default_files, load_cases
from loragate.mutants.child import limit_memory, run_order
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
    import_for_first_calls()
    for name in _OPTIONAL:
        with suppress(ImportError):
            importlib.import_module(name)
    cases = {run_id(SUBJECT, c): c for c in load_cases(default_files(project_root()))}
    assert PACKAGE not in sys.modules, "the server has imported the package under test"
    limited = not torch.cuda.is_available() or bool(os.environ.get("TRITON_INTERPRET"))

    def run(line: bytes) -> None:
        if limited:
            limit_memory()
        run_order(from_json(line), cases)

    serve(run)
    return 0


if __name__ == "__main__":
    sys.exit(main())
