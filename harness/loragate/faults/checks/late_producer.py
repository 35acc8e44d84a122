# triton ships no types, and a @triton.jit function only looks like python
# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""A kernel that lets its successor start long before it has written anything.

Other kernels of a model may do so (programmatic dependent launch), and a kernel that follows them
has to wait before it reads.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

BLOCK = 1024


@triton.jit
def late_copy_kernel(source_ptr, target_ptr, sink_ptr, count, spins, BLOCK: tl.constexpr):
    gdc_launch_dependents()
    program = tl.program_id(0)
    turns = tl.load(sink_ptr + program)
    for _ in range(spins):
        turns = turns * 0.5 + 0.25
    tl.store(sink_ptr + program, turns)
    offs = program * BLOCK + tl.arange(0, BLOCK)
    # always true, but known only after the loop
    mask = (offs < count) & (turns < 2.0)
    tl.store(target_ptr + offs, tl.load(source_ptr + offs, mask=mask), mask=mask)
