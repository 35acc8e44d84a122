"""Everything that the adapters of a model need beside their weights, reserved before it serves.

Phase 1 is `ServingBuffers.reserve`: it allocates what the largest batch needs, and says how many
bytes that is, before the rest of the memory is given to a cache. Phase 2 is the preparation of each
step, `buffers.batch.prepare`, also of the steps that are captured. Nothing is allocated or grows in
it: a step that is larger than what was reserved is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lorakernels.batch.metadata import BatchMetadata
from lorakernels.dense.ops import DenseWorkspace
from lorakernels.dense.weights import SlotWeights
from lorakernels.layers.gdn import GatedDeltaNetInputProjection
from lorakernels.layers.linear import LinearAdapters
from lorakernels.layers.moe import FusedMoELoRA, MoEScratch
from lorakernels.moe.align.metadata import PairMetadata
from lorakernels.moe.weights import ExpertWeights
from lorakernels.runtime.device import allocated_bytes

LoRALayer = LinearAdapters | GatedDeltaNetInputProjection | FusedMoELoRA


@dataclass(frozen=True, slots=True, order=True)
class ExpertSizes:
    """Layers that are equal in these share one scratch."""

    hidden: int
    intermediate: int
    dtype: str

    @classmethod
    def of(cls, layer: FusedMoELoRA) -> ExpertSizes:
        return cls(layer.packing.hidden, layer.cut.intermediate.size, str(layer.dtype))


class ServingBuffers:
    """One set of buffers for all layers of a model that run one after the other. Layers that run on
    streams of the caller need a set for each stream.

    batch: the mapping of a step, for up to `max_tokens` rows.
    dense: the workspace of all linear layers and input projections, None without any.
    max_tokens: rows of the largest batch. A request of several tokens has as many rows.
    """

    def __init__(
        self,
        layers: Mapping[str, LoRALayer],
        *,
        max_tokens: int,
        top_k: int | None,
        branches: int,
    ) -> None:
        self.layers, self.max_tokens = dict(layers), max_tokens
        device, num_slots = _common(layers)
        before = allocated_bytes(device)
        self.batch = BatchMetadata(max_tokens=max_tokens, max_slots=num_slots, device=device)
        slots = [layer.slots for layer in layers.values() if not isinstance(layer, FusedMoELoRA)]
        self.dense = (
            DenseWorkspace(slots, max_tokens=max_tokens, branches=branches) if slots else None
        )
        experts = [layer for layer in layers.values() if isinstance(layer, FusedMoELoRA)]
        self._scratch: dict[ExpertSizes, MoEScratch] = {}
        self._pairs: dict[int, PairMetadata] = {}
        self._of_layer: dict[FusedMoELoRA, tuple[MoEScratch, PairMetadata]] = {}
        if experts:
            self._reserve_experts(experts, _checked_top_k(top_k))
        # a block of over 1 MiB is given as it is found where less than that would be left of it
        taken = allocated_bytes(device) - before
        self._rounding = max(0, taken - sum(map(_num_bytes, self.tensors)))

    @classmethod
    def reserve(
        cls,
        layers: Mapping[str, nn.Module],
        *,
        max_tokens: int,
        top_k: int | None = None,
        branches: int = 1,
    ) -> ServingBuffers:
        """Allocate what batches of up to `max_tokens` rows need.

        layers: LoRALinear, WrappedLoRALinear, LoRAEmbedding, GatedDeltaNetInputProjection and
            FusedMoELoRA by their names, of one device and with one number of slots.
        top_k: experts of a token; needed with a FusedMoELoRA.
        branches: branches of a fork that may use the dense workspace at the same time, such as
            shared experts beside the routed ones; see DenseWorkspace.
        Raises ValueError.
        """
        return cls(_checked(layers), max_tokens=max_tokens, top_k=top_k, branches=branches)

    def experts(self, layer: FusedMoELoRA) -> MoEScratch:
        """The scratch of a layer, which all layers of its sizes share. ValueError."""
        return self._reserved_for(layer)[0]

    def pairs(self, layer: FusedMoELoRA) -> PairMetadata:
        """The pairs of a layer, which all layers of as many experts share. ValueError."""
        return self._reserved_for(layer)[1]

    @property
    def sizes(self) -> Mapping[str, int]:
        """Bytes by what they are for. What the allocator adds is the difference of its counter,
        which counts what other threads allocate during the reservation, too."""
        found = {name: sum(map(_num_bytes, parts)) for name, parts in self._by_purpose().items()}
        return found | ({"rounding of the allocator": self._rounding} if self._rounding else {})

    @property
    def num_bytes(self) -> int:
        """Bytes of all that was reserved."""
        return sum(self.sizes.values())

    @property
    def tensors(self) -> list[Tensor]:
        """Everything that was reserved."""
        return [tensor for found in self._by_purpose().values() for tensor in found]

    @property
    def slot_weights(self) -> list[SlotWeights | ExpertWeights]:
        """The stacked adapters of all layers, which were not reserved here."""
        return [weights for layer in self.layers.values() for weights in _slot_weights(layer)]

    def _reserve_experts(self, layers: Iterable[FusedMoELoRA], top_k: int) -> None:
        groups: dict[ExpertSizes, list[FusedMoELoRA]] = {}
        for layer in layers:
            groups.setdefault(ExpertSizes.of(layer), []).append(layer)
        sizes = {"max_tokens": self.max_tokens, "top_k": top_k}
        for key, group in groups.items():
            scratch = self._scratch[key] = MoEScratch(group, **sizes)
            for layer in group:
                count = layer.cut.experts.size
                if count not in self._pairs:
                    self._pairs[count] = self._make_pairs(count, sizes)
                self._of_layer[layer] = (scratch, self._pairs[count])

    def _make_pairs(self, num_experts: int, sizes: Mapping[str, int]) -> PairMetadata:
        return PairMetadata(
            **sizes,
            num_experts=num_experts,
            max_slots=self.batch.max_slots,
            device=self.batch.token_slots.device,
            with_base=True,
        )

    def _by_purpose(self) -> dict[str, list[Tensor]]:
        found = {"mapping of the batch": self.batch.buffers}
        if self.dense is not None:
            found["shrink output and stored deltas of linear layers"] = self.dense.buffers
        for sizes, scratch in self._scratch.items():
            name = f"scratch of experts of {sizes.hidden} and {sizes.intermediate} in {sizes.dtype}"
            found[name] = scratch.tensors
        for count, pairs in self._pairs.items():
            found[f"pairs of {count} experts"] = [*pairs.buffers, pairs.step]
        return found

    def _reserved_for(self, layer: FusedMoELoRA) -> tuple[MoEScratch, PairMetadata]:
        found = self._of_layer.get(layer)
        if found is None:
            sizes = ExpertSizes.of(layer)
            raise ValueError(
                "nothing was reserved for this layer, and nothing grows after it: experts of "
                f"{sizes.hidden} and {sizes.intermediate} in {sizes.dtype}, "
                f"{layer.cut.experts.size} of them (reserved: {', '.join(self._by_purpose())})"
            )
        return found


def _num_bytes(tensor: Tensor) -> int:
    return tensor.untyped_storage().nbytes()


def _slot_weights(layer: LoRALayer) -> list[SlotWeights | ExpertWeights]:
    if isinstance(layer, FusedMoELoRA):
        return [layer.w13_slots, layer.w2_slots]
    return [layer.slots]


def _checked(layers: Mapping[str, nn.Module]) -> dict[str, LoRALayer]:
    checked: dict[str, LoRALayer] = {}
    for name, layer in layers.items():
        if not isinstance(layer, LoRALayer):
            raise ValueError(
                f"{name} must be a LoRALinear, a WrappedLoRALinear, a LoRAEmbedding, a "
                f"GatedDeltaNetInputProjection or a FusedMoELoRA (got {type(layer).__name__})"
            )
        checked[name] = layer
    return checked


def _common(layers: Mapping[str, LoRALayer]) -> tuple[torch.device, int]:
    """The device and the number of slots of all layers. ValueError."""
    if not layers:
        raise ValueError("layers must name at least one layer (got none)")
    counts = {layer.num_slots for layer in layers.values()}
    devices = {_slot_weights(layer)[0].a.device for layer in layers.values()}
    if len(counts) > 1:
        raise ValueError(f"layers must have one number of slots (got {sorted(counts)})")
    if len(devices) > 1:
        raise ValueError(
            f"layers must be on one device (got {', '.join(sorted(map(str, devices)))})"
        )
    return devices.pop(), counts.pop()


def _checked_top_k(top_k: int | None) -> int:
    if top_k is None:
        raise ValueError("top_k must be given with a FusedMoELoRA (got None)")
    return top_k
