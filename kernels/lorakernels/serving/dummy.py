"""Adapters for the time of a capture, so that a dummy run is a step with adapters in every slot."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from lorakernels.dense.weights import LoRAFactors, SlotWeights
from lorakernels.moe.weights import ExpertFactors, ExpertWeights

Weights = SlotWeights | ExpertWeights

# small enough for the sums of any layer to stay finite in fp16
_VALUE = 2.0**-8


@contextmanager
def dummy_adapters(weights: Sequence[Weights]) -> Iterator[None]:
    """Adapters of full rank in all free slots of all layers until this is left; a slot is free if
    it is empty in every layer. Resident adapters stay as they are. Waits for the device."""
    free = _free_slots(weights)
    try:
        for slot in free:
            for layer in weights:
                _load(layer, slot)
        yield
    finally:
        for slot in free:
            for layer in weights:
                layer.reset(slot)


def _free_slots(weights: Sequence[Weights]) -> list[int]:
    is_taken = torch.stack([layer.ranks.ne(0).any(dim=1) for layer in weights]).any(dim=0)
    return [slot for slot, taken in enumerate(is_taken.tolist()) if not taken]


def _load(layer: Weights, slot: int) -> None:
    rank, width_in = layer.rank, layer.in_features
    if isinstance(layer, ExpertWeights):
        # a first axis of 1 stands for all experts
        layer.load(
            slot,
            [
                ExpertFactors(
                    _constant(layer.a, 1, rank, width_in), _constant(layer.b, 1, n, rank), 1.0
                )
                for n in layer.slice_widths
            ],
        )
        return
    layer.load(
        slot,
        [
            LoRAFactors(_constant(layer.a, rank, width_in), _constant(layer.b, n, rank), 1.0)
            for n in layer.slice_widths
        ],
    )


def _constant(like: Tensor, *shape: int) -> Tensor:
    """A factor whose values are one number in memory."""
    return like.new_full((), _VALUE).expand(shape)
