"""A process that has imported what first calls need imports no compiler in them."""

from __future__ import annotations

import subprocess
import sys

import pytest

_CALLS = """
import sys
from loragate.core.machine import select_interpreter
select_interpreter()
import torch
from lorakernels import BatchMetadata, DenseWorkspace, LoRALinear, Slice
if sys.argv[1] == "imported":
    from loragate.core.first_calls import import_for_first_calls
    import_for_first_calls()
layer = LoRALinear(torch.ones(8, 8), slices=[Slice("only", 8)], num_slots=1, rank=1)
step = BatchMetadata(max_tokens=4, max_slots=1, device="cpu")
workspace = DenseWorkspace([layer.slots], max_tokens=4)
step.prepare(torch.zeros(4, dtype=torch.int32))
before = set(sys.modules)
layer(torch.ones(4, 8), step, workspace)
print(len([name for name in set(sys.modules) - before if name.startswith("torch._dynamo")]))
"""


@pytest.mark.parametrize("when", ["imported", "not imported"])
def test_a_first_call_imports_the_compiler_unless_it_is_there(when: str) -> None:
    command = [sys.executable, "-c", _CALLS, when]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    # the number without them shows that there is something to import
    assert (int(done.stdout) > 0) == (when == "not imported")
