"""The modules that stand in a transformers model where its linears and experts were.

Invariant: they hold no state between forward passes but for the layers and the place of the
buffers; several modules that share one layer are called with one input, one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from lorakernels.layers.embedding import LoRAEmbedding
from lorakernels.layers.gdn import GatedDeltaNetInputProjection
from lorakernels.layers.linear import LoRALinear
from lorakernels.layers.moe import FusedMoELoRA
from lorakernels.serving.buffers import ServingBuffers


@dataclass(slots=True)
class BufferPlace:
    """Where the modules of a model find the buffers, which are reserved after the modules have been
    put in place, because the sizes are those of the layers."""

    buffers: ServingBuffers | None = None

    def get(self) -> ServingBuffers:
        """RuntimeError before the buffers have been reserved."""
        if self.buffers is None:
            raise RuntimeError("the model has no buffers yet; a Decoder reserves them")
        return self.buffers


class PackedProjection(nn.Module):
    """One layer in place of modules that the model calls one after the other with one input.

    The first call computes the columns of all of them, and the others get theirs. A module that is
    called out of order, or with another tensor than the first one, would get the columns of
    something else: RuntimeError.
    """

    def __init__(
        self,
        name: str,
        members: Sequence[str],
        layer: LoRALinear | GatedDeltaNetInputProjection,
        place: BufferPlace,
    ) -> None:
        super().__init__()
        self.layer = layer
        self._name, self._members, self._place = name, tuple(members), place
        self._input: Tensor | None = None
        self._columns: Sequence[Tensor] = ()
        self._next = 0

    def columns(self, index: int, x: Tensor) -> Tensor:
        """x [.., in_features] -> [.., columns of a member]."""
        if index == 0:
            self._input, self._columns = x, self._compute(x)
        elif index != self._next or x is not self._input:
            raise RuntimeError(
                f"{self._name}: {self._members[index]} must be called right after "
                f"{self._members[index - 1]} and with the same tensor"
            )
        found = self._columns[index]
        self._next = index + 1
        if self._next == len(self._members):
            # the memory of both is free for what follows
            self._input, self._columns = None, ()
        return found

    def _compute(self, x: Tensor) -> Sequence[Tensor]:
        buffers = self._place.get()
        assert buffers.dense is not None, "buffers were reserved for this layer"
        if isinstance(self.layer, GatedDeltaNetInputProjection):
            both: tuple[Tensor, Tensor] = self.layer(x, buffers.batch, buffers.dense)
            return both
        out: Tensor = self.layer(x, buffers.batch, buffers.dense)
        return torch.split(out, [part.width for part in self.layer.packing.slices], dim=-1)


class Columns(nn.Module):
    """Stands for one of the modules of a PackedProjection."""

    def __init__(self, packed: PackedProjection, index: int) -> None:
        super().__init__()
        # a bound method: the projection is registered once, under its own name
        self._columns: Callable[[Tensor], Tensor] = partial(packed.columns, index)

    def forward(self, x: Tensor) -> Tensor:
        return self._columns(x)


class ServedEmbedding(nn.Module):
    """Stands for the vocabulary embedding of a transformers model."""

    def __init__(self, layer: LoRAEmbedding, place: BufferPlace) -> None:
        super().__init__()
        self.layer = layer
        self._place = place

    def forward(self, ids: Tensor) -> Tensor:
        """ids [..] -> [.., hidden]."""
        buffers = self._place.get()
        assert buffers.dense is not None, "buffers were reserved for this layer"
        out: Tensor = self.layer(ids, buffers.batch, buffers.dense)
        return out


class ServedExperts(nn.Module):
    """Stands for the experts of a transformers model."""

    def __init__(self, layer: FusedMoELoRA, place: BufferPlace) -> None:
        super().__init__()
        self.layer = layer
        self._place = place

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """hidden_states [rows, hidden], ids and weights of the experts [rows, top_k] ->
        [rows, hidden]."""
        buffers = self._place.get()
        out: Tensor = self.layer(
            hidden_states,
            top_k_index.int(),
            top_k_weights.float(),
            buffers.batch,
            buffers.pairs(self.layer),
            buffers.experts(self.layer),
        )
        return out
