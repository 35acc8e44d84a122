"""The intermediate results of MoE layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from lorakernels.moe.delta.ops import MoEWorkspace
from lorakernels.moe.layer.types import ExpertBuffers

if TYPE_CHECKING:
    from lorakernels.layers.moe import FusedMoELoRA


class MoEScratch:
    """The intermediate results of the layers of a model, allocated once: for layers of the same
    sizes and dtype that run one after the other, and batches of up to `max_tokens` rows.
    ValueError."""

    def __init__(self, layers: Sequence[FusedMoELoRA], *, max_tokens: int, top_k: int) -> None:
        layers = list(layers)
        _check_types(layers)
        sizes = {(layer.packing.hidden, layer.cut.intermediate.size) for layer in layers}
        if len(sizes) != 1:
            found = ", ".join(f"{h} and {i}" for h, i in sorted(sizes)) or "no layer"
            raise ValueError(f"layers must have one hidden and intermediate size (got {found})")
        dtypes = {str(layer.dtype) for layer in layers}
        if len(dtypes) > 1:
            raise ValueError(f"layers must have one dtype (got {', '.join(sorted(dtypes))})")
        weights = [slots for layer in layers for slots in (layer.w13_slots, layer.w2_slots)]
        self.workspace = MoEWorkspace(weights, max_tokens=max_tokens, top_k=top_k)
        ((hidden, intermediate),) = sizes
        self.buffers = ExpertBuffers(
            max_tokens=max_tokens,
            top_k=top_k,
            hidden=hidden,
            intermediate=intermediate,
            dtype=weights[0].a.dtype,
            device=self.workspace.shrunk.device,
        )

    @property
    def tensors(self) -> list[Tensor]:
        """Everything that it has allocated."""
        return [self.workspace.shrunk, self.buffers.act, self.buffers.y]


def _check_types(layers: Sequence[object]) -> None:
    # imports this module
    from lorakernels.layers.moe import FusedMoELoRA

    for layer in layers:
        if not isinstance(layer, FusedMoELoRA):
            raise ValueError(f"layers must be FusedMoELoRA (got a {type(layer).__name__})")
