"""Buffers and steps of a decoder without graphs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from lorakernels.batch.metadata import BatchMetadata
from lorakernels.dense.ops import DenseWorkspace
from lorakernels.layers.moe import FusedMoELoRA, MoEScratch
from lorakernels.moe.align.metadata import PairMetadata
from lorakernels.serving.replace import ServedLayer


class EagerBuffers:
    def __init__(
        self, layers: Mapping[str, ServedLayer], *, max_tokens: int, top_k: int | None = None
    ) -> None:
        experts = [x for x in layers.values() if isinstance(x, FusedMoELoRA)]
        dense = [x.slots for x in layers.values() if not isinstance(x, FusedMoELoRA)]
        sizes: dict[str, Any] = {
            "max_tokens": max_tokens,
            "max_slots": next(iter(layers.values())).num_slots,
            "device": dense[0].a.device,
        }
        self.batch = BatchMetadata(**sizes)
        self.dense = DenseWorkspace(dense, max_tokens=max_tokens)
        if experts:
            assert top_k is not None
            self._scratch = MoEScratch(experts, max_tokens=max_tokens, top_k=top_k)
            self._pairs = PairMetadata(
                top_k=top_k, num_experts=experts[0].packing.num_experts, with_base=True, **sizes
            )

    def experts(self, layer: FusedMoELoRA) -> MoEScratch:
        return self._scratch

    def pairs(self, layer: FusedMoELoRA) -> PairMetadata:
        return self._pairs


class EagerRunner:
    def __init__(
        self, step: Callable[[int], Tensor], inputs: Mapping[str, Tensor], buffers: EagerBuffers
    ) -> None:
        self._step, self._inputs, self._buffers = step, inputs, buffers

    def run(self, token_slots: Tensor, **host: Tensor) -> Tensor:
        rows = len(token_slots)
        for name, tensor in host.items():
            self._inputs[name][:rows].copy_(tensor)
        self._buffers.batch.prepare(token_slots)
        return self._step(rows)
