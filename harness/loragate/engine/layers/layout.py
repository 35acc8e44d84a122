"""Where values stand in the residual stream, and how a projection reads and writes them rotated."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from loragate.engine.language import CHOICES, PLACES, Language

# of the values that an activation sees
GAIN = 4.0
# of the logits: a wrong place loses at least 0.11 of it, a wrong cycle all of it
LOUDNESS = 80.0

Pair = slice
# B and A in fp64; what they add to a weight is B @ A
Delta = tuple[Tensor, Tensor]
Deltas = dict[str, Delta]


@dataclass(frozen=True, slots=True)
class Layout:
    """The dimensions of the residual stream."""

    language: Language

    def place(self, layer: int) -> Pair:
        """The angle of the word, before layer `layer`."""
        return slice(2 * layer, 2 * layer + 2)

    def selected(self, layer: int) -> Pair:
        """The angle that the attention of a layer has copied."""
        start = 2 * (self.language.layers + 1 + layer)
        return slice(start, start + 2)

    @property
    def value(self) -> Pair:
        """The angle of a number."""
        start = 2 * (2 * self.language.layers + 1)
        return slice(start, start + 2)

    @property
    def one(self) -> int:
        return int(self.value.stop)

    @property
    def bos(self) -> int:
        return self.one + 1

    def is_number(self, layer: int, choice: int) -> int:
        return self.bos + 1 + layer * CHOICES + choice

    def is_of_cycle(self, cycle: int) -> int:
        return self.is_number(self.language.layers, 0) + cycle

    @property
    def size(self) -> int:
        """A multiple of 64."""
        used = self.is_of_cycle(self.language.cycles)
        return -(-used // 64) * 64


def angle(place: float) -> Tensor:
    angle = 2 * math.pi * place / PLACES
    return torch.tensor([math.cos(angle), math.sin(angle)], dtype=torch.float64)


def zeros(*shape: int) -> Tensor:
    return torch.zeros(*shape, dtype=torch.float64)


def norm(layout: Layout, square: float) -> Tensor:
    """The weight that undoes the norm of a token whose values have this sum of squares."""
    return torch.full((layout.size,), math.sqrt(square / layout.size), dtype=torch.float64)


def rotation(shift: int) -> Tensor:
    cos, sin = angle(shift).tolist()
    return torch.tensor([[cos, -sin], [sin, cos]], dtype=torch.float64)


def reading(weight: Tensor, pair: Pair, shift: int) -> tuple[Tensor, Tensor]:
    """The delta after which `weight` reads a pair of values rotated by `shift`."""
    a = zeros(2, weight.shape[1])
    a[:, pair] = torch.eye(2, dtype=torch.float64)
    return weight[:, pair] @ (rotation(shift) - torch.eye(2, dtype=torch.float64)), a


def writing(weight: Tensor, pair: Pair, shift: int) -> tuple[Tensor, Tensor]:
    """The delta after which `weight` writes a pair of values rotated by `shift`."""
    b = zeros(weight.shape[0], 2)
    b[pair] = rotation(shift) - torch.eye(2, dtype=torch.float64)
    return b, weight[pair]
