"""How gate and up lie in one tensor. Nothing in the shapes tells one order from the other."""

from __future__ import annotations

from enum import Enum, auto

from torch import Tensor


class GateUp(Enum):
    """The order of the rows of gate and up: in w13 and its bias, and in the B of adapters that have
    one module, gate_up_proj, for both."""

    # all rows of the gate, then all rows of up: Qwen, Mixtral, DeepSeek, Gemma
    HALVES = auto()
    # rows of the gate and of up in turn, beginning with the gate: GPT-OSS
    INTERLEAVED = auto()


def gate_and_up(rows: Tensor, order: GateUp) -> tuple[Tensor, Tensor]:
    """Gate and up of rows [experts, 2 * intermediate, ..]; views of them."""
    if order is GateUp.INTERLEAVED:
        return rows[:, 0::2], rows[:, 1::2]
    gate, up = rows.chunk(2, dim=1)
    return gate, up
