"""The schedule oracle does the programs of a launch in another order as well."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from torch import Tensor

from loragate.core.machine import detect_machine, select_interpreter

select_interpreter()

import triton  # noqa: E402
import triton.language as tl  # noqa: E402

from loragate.core.verdict import Failure, Judgement, OracleName, Verdict  # noqa: E402

from .stream_layers import Layer  # noqa: E402

pytestmark = pytest.mark.skipif(
    not detect_machine().interpreted, reason="programs have an order in the interpreter alone"
)


@triton.jit
def number_kernel(target_ptr, STEP: tl.constexpr):
    program = tl.program_id(0)
    tl.store(target_ptr + program * STEP, program.to(tl.float32))


class EachItsOwnElement(Layer):
    step = 1

    def work(self, x: Tensor) -> None:
        super().work(x)
        number_kernel[(2,)](self.delta, STEP=self.step)


class TheLastOneWins(EachItsOwnElement):
    """All programs of a launch write the same element."""

    step = 0


def test_programs_that_write_the_same_element_fail(judge_streams: Callable[..., Judgement]) -> None:
    judgement = judge_streams(TheLastOneWins, OracleName.SCHEDULE)
    assert judgement.failure is Failure.SCHEDULE_DEPENDENT, judgement
    assert "the programs of every launch from last to first" in judgement.message
    right = judge_streams(EachItsOwnElement, OracleName.SCHEDULE)
    assert right.verdict is Verdict.PASS, right
