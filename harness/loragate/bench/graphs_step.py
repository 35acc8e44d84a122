"""The captured decode step that a row of `bench graphs` replays."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch

from loragate.bench.graphs_rows import LAYERS, MAX_TOKENS, MODELS, RANK, SLOTS, ReplayRow
from loragate.bench.lorakernels_decode import DecodeSteps
from loragate.core.machine import Machine
from loragate.execution.graph import capture

WARM_UP = 5


def decode_model(model: str, slots: int, machine: Machine) -> DecodeSteps:
    return DecodeSteps(
        MODELS[model],
        layers=LAYERS,
        slots=slots,
        rank=RANK,
        max_tokens=MAX_TOKENS,
        dtype=torch.bfloat16,
        device=machine.device,
    )


@contextmanager
def captured_step(row: ReplayRow, machine: Machine) -> Iterator[torch.cuda.CUDAGraph]:
    """The graph of the step of this row, which was replayed a few times."""
    model = decode_model(row.model, SLOTS, machine)
    slots = torch.tensor(row.token_slots, dtype=torch.int32)
    with model.adapters():
        model.inputs.write(slots, {"ids": torch.arange(row.tokens)})
        model.buffers.batch.prepare(slots)
        graph = capture(partial(model.step, row.tokens)).graph
        for _ in range(WARM_UP):
            graph.replay()
        yield graph
