"""The mapping of a step for every number of rows that its tensors may have.

vLLM maps the live rows. How far a graph pads them is known when an operator runs, and the height of
its tiles follows from that; a captured graph reads the tables of its own height.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lorakernels.batch.metadata import HEIGHTS, BatchMetadata, tile_height
from lorakernels.dense.launch import TileTables
from lorakernels.runtime.tuning import tuning_of

_OF_EACH = len(TileTables._fields)
_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_LIMITS = torch.iinfo(torch.int32)


class StepTables:
    """`tensors`: tile_slots, tile_rows and num_tiles of each height, flat, as an operator takes
    them. `live` [1], int32 on the CPU: the rows that are mapped; all others are base rows.
    `row_slots` [max_tokens], int32: the slot of each row."""

    def __init__(self, *, max_tokens: int, max_slots: int, device: torch.device | str) -> None:
        device = torch.device(device)
        tallest = tile_height(max_tokens, tuning_of(device))
        self._steps = [
            BatchMetadata(max_tokens=max_tokens, max_slots=max_slots, device=device, height=height)
            for height in HEIGHTS
            if height <= tallest
        ]
        self.tensors = [
            tensor
            for step in self._steps
            for tensor in (step.tile_slots, step.tile_rows, step.num_tiles)
        ]
        self.live = torch.zeros(1, dtype=torch.int32, device="cpu")

    @property
    def row_slots(self) -> Tensor:
        return self._steps[0].token_slots

    def prepare(self, slots: Tensor) -> None:
        """Install the slots of the live rows, on this device: integers of up to 64 bits. -1 is a
        base row. On a GPU so is an id that no slot has, and nothing waits for its value; on the CPU
        it is refused. Raises ValueError with nothing changed."""
        slots = _in_32_bits(slots)
        for step in self._steps:
            step.prepare(slots)
        self.live.fill_(len(slots))


def _in_32_bits(slots: Tensor) -> Tensor:
    """The same ids, queued without a wait; one that is too large for 32 bits becomes the largest
    that is not, and has no slot either. ValueError."""
    if slots.dtype not in _INTEGERS:
        raise ValueError(f"token_slots must be uint8 or int8 to int64 (got {slots.dtype})")
    if slots.dtype is torch.int64:
        # a cast alone keeps the last bits, which may be those of a slot
        slots = slots.clamp(_LIMITS.min, _LIMITS.max)
    return slots.to(torch.int32)


def tables_of_first_rows(
    row_slots: Tensor, num_rows: int, *, max_slots: int, height: int
) -> TileTables:
    """The tables of the first rows of a mapping, without those behind them. Made by the caller's
    stream from what `row_slots` holds then: in a graph each replay makes those of its step."""
    step = BatchMetadata(
        max_tokens=num_rows, max_slots=max_slots, device=row_slots.device, height=height
    )
    step.prepare(row_slots[:num_rows])
    return TileTables.of(step)


def host_value(flag: Tensor) -> int:
    """The value of a CPU tensor of one element. One on a device raises, where `item` would wait."""
    return int(flag.numpy()[0])


def tables_of_height(tensors: Sequence[Tensor], height: int) -> TileTables:
    """The tables of one height among `StepTables.tensors`. ValueError."""
    start = _OF_EACH * HEIGHTS.index(height)
    if start >= len(tensors):
        raise ValueError(
            f"x must have few enough rows for tiles of {HEIGHTS[len(tensors) // _OF_EACH - 1]} "
            f"rows, as the server was set up for (got rows for tiles of {height})"
        )
    return TileTables(*tensors[start : start + _OF_EACH])
