"""A server's life in any order: adapters are loaded and evicted, graphs captured, steps run.
Whatever came before, each row is what plain torch makes of it alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from loragate.core.machine import select_interpreter

select_interpreter()

from lorakernels.serving.graph_runner import GraphRunner  # noqa: E402

SLOTS, MOST = 3, 6
SIZES = (1, 4)


def test_every_row_is_served_as_it_would_be_alone_whatever_came_before(
    make_stack: Any, graphs: Any
) -> None:
    class Server(RuleBasedStateMachine):
        @initialize(loaded=st.sets(st.integers(0, SLOTS - 1)))
        def start(self, loaded: set[int]) -> None:
            graphs.made.clear()
            self.stack = make_stack(max_tokens=MOST, slots=SLOTS)
            stack = self.stack
            for slot in loaded:
                stack.load(slot, slot)
            self.runner = GraphRunner(stack.step, stack.inputs, stack.buffers, sizes=SIZES)
            self.addresses = [tensor.data_ptr() for tensor in stack.buffers.tensors]

        @rule(slot=st.integers(0, SLOTS - 1), seed=st.integers(0, 20))
        def load(self, slot: int, seed: int) -> None:
            self.stack.load(slot, seed)

        @rule(slot=st.integers(0, SLOTS - 1))
        def evict(self, slot: int) -> None:
            self.stack.evict(slot)

        @rule()
        def capture(self) -> None:
            self.runner.capture()

        @rule(
            slots=st.lists(st.integers(-1, SLOTS - 1), min_size=1, max_size=MOST),
            seed=st.integers(0, 9),
        )
        def run(self, slots: list[int], seed: int) -> None:
            values = self.stack.values(len(slots), seed)
            before = len(self.stack.called)
            found = self.runner.run(torch.tensor(slots, dtype=torch.int32), **values)
            wanted = self.stack.wanted(slots, values)
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
            eager = len(slots) > max(SIZES) or not self.runner.keys
            assert len(self.stack.called) - before == eager

        @invariant()
        def nothing_moves(self) -> None:
            found = [tensor.data_ptr() for tensor in self.stack.buffers.tensors]
            assert found == self.addresses

        @invariant()
        def empty_slots_are_empty(self) -> None:
            for slot in set(range(SLOTS)) - self.stack.resident.keys():
                for weights in self.stack.buffers.slot_weights:
                    assert not any(part[slot].any() for part in weights.tensors)

    case = Server.TestCase
    case.settings = settings(max_examples=6, stateful_step_count=8)
    case().runTest()


@pytest.mark.parametrize("slots", [[0], [-1, 1, 0], [2, 2, -1, 0]])
def test_a_captured_step_has_the_bits_of_the_padded_step_run_eagerly(
    make_stack: Any, graphs: Any, slots: list[int]
) -> None:
    stack = make_stack(max_tokens=MOST, slots=SLOTS, moe=True)
    for slot in range(SLOTS):
        stack.load(slot, slot)
    runner = GraphRunner(stack.step, stack.inputs, stack.buffers, sizes=(4,))
    runner.capture()
    values, mapping = stack.values(len(slots), 3), torch.tensor(slots, dtype=torch.int32)
    found = runner.run(mapping, **values).clone()
    stack.inputs.write(mapping, values)
    stack.buffers.batch.prepare(mapping, num_rows=4)
    assert torch.equal(found, stack.step(4)[: len(slots)])
