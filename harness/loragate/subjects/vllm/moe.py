"""Subject `vllm`, site moe_delta: the MoE LoRA of vLLM, called as its layers call it.

Alignment, tile sizes and the operator are reached through the wrapper that the layers use. A path
is forced with the arguments by which vLLM's dispatcher chooses:

* one_shot: aligned pairs;
* small_batch: pairs without alignment; the dispatcher takes its kernel for few pairs, and the
  one-shot kernel with a tile for each pair where rank * pairs is above 1024 or the rank above 64;
* two_kernel: as a layer with fully sharded adapters, in a group of one process; vLLM 0.26 has no
  other way to it.

Weights are stacked for each slice, B holds scale * B, and shared factors are expanded over the
experts without a copy.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from loragate.inputs.draw import torch_dtype
from loragate.matrix.case import (
    Case,
    ExpertMap,
    Path,
    Ranks,
    RouterWeights,
    Sharing,
    Source,
    Write,
)
from loragate.protocol import Pool, Routes
from loragate.subjects.vllm.moe_package import VllmMoEOps
from loragate.subjects.vllm.package import fold_scale

ONE_SHOT_MAX_RANK = 128
# the alignment gives each expert a thread of one block, and needs one more
ALIGNMENT_MAX_EXPERTS = 992
# pairs are left unaligned where there are few for the slots and experts of a layer
_SPARSITY = 8


def refusal(case: Case) -> str | None:
    """The reason why vLLM 0.26 cannot run a case of moe_delta, or None."""
    two_kernel = case.path is Path.TWO_KERNEL
    mapped = case.expert_map is ExpertMap.PARALLEL
    weighted = case.router is RouterWeights.OUTPUT
    aligned_experts = case.global_experts + mapped
    reasons = {
        "slices of different widths: its kernels take the width of the first for all": (
            len(set(case.slices)) > 1
        ),
        f"rank {case.rank} is above the limit of {ONE_SHOT_MAX_RANK} that its one-shot kernel "
        "asserts": case.rank > ONE_SHOT_MAX_RANK and not two_kernel,
        "its two-kernel path asserts that it adds": two_kernel and case.write is Write.STORE,
        "storing writes zeros for the slices that an adapter lacks; its layers hand zeros in": (
            case.write is Write.STORE and case.ranks is Ranks.MIXED
        ),
        "its layers align whatever has an expert map": mapped and case.path is Path.SMALL_BATCH,
        "it weighs pairs that have a row of x each, as in w2": (
            weighted and case.source is Source.TOKEN and case.top_k > 1
        ),
        f"{aligned_experts} experts are above the limit of {ALIGNMENT_MAX_EXPERTS} of its "
        "alignment": aligned_experts > ALIGNMENT_MAX_EXPERTS and case.path is not Path.SMALL_BATCH,
    }
    return next((reason for reason, applies in reasons.items() if applies), None)


@dataclass(frozen=True, slots=True)
class LayerShapes:
    """What one launch needs to know of its layer; `weighted` pairs each have a row of x."""

    num_slots: int
    experts: int
    top_k: int
    slices: tuple[int, ...]
    in_features: int
    rank: int
    max_tokens: int
    weighted: bool

    @classmethod
    def of(cls, case: Case) -> LayerShapes:
        one_each = case.source is Source.PAIR or case.router is RouterWeights.OUTPUT
        return cls(
            num_slots=case.slots,
            experts=case.experts,
            top_k=case.top_k,
            slices=case.slices,
            in_features=case.in_features,
            rank=case.rank,
            # the oracles give even a case without tokens steps with one token
            max_tokens=max(case.tokens, 1),
            weighted=one_each,
        )

    @property
    def base_shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shapes of w13 and w2 of the base layer, by which tile sizes are looked up."""
        wide, narrow = sum(self.slices), self.slices[0]
        if self.weighted:
            inner = self.in_features
            return (self.experts, 2 * inner, wide), (self.experts, wide, inner)
        return (self.experts, wide, self.in_features), (self.experts, self.in_features, narrow)


@dataclass(frozen=True, slots=True)
class Assignment:
    """Which pairs each program gets. Without `sorted_ids` each gets one pair."""

    mapping: Tensor
    sorted_ids: Tensor | None
    expert_ids: Tensor
    num_post_pad: Tensor | None


class VllmMoEInstance:
    """`a[slice]` is [slots, experts or 1, rank, in_features], `b[slice]` is [slots, experts or 1,
    slice width, rank]."""

    def __init__(
        self,
        ops: VllmMoEOps,
        shapes: LayerShapes,
        *,
        dtype: torch.dtype,
        device: str,
        path: Path = Path.PLAN,
        sharing: Sharing = Sharing.PER_EXPERT,
        add_inputs: bool = True,
    ) -> None:
        self.shapes, self.path, self.add_inputs = shapes, path, add_inputs
        a_experts = 1 if sharing is Sharing.SHARED_A else shapes.experts
        b_experts = 1 if sharing is Sharing.SHARED_B else shapes.experts

        def stacked(experts: int, *shape: int) -> Tensor:
            return torch.zeros(shapes.num_slots, experts, *shape, dtype=dtype, device=device)

        self.a = [stacked(a_experts, shapes.rank, shapes.in_features) for _ in shapes.slices]
        self.b = [stacked(b_experts, width, shapes.rank) for width in shapes.slices]
        self._enabled = torch.zeros(shapes.num_slots + 1, dtype=torch.int32, device=device)
        # the operator requires weights even where it does not read them
        self._ones = torch.ones(shapes.max_tokens, shapes.top_k, device=device)
        self._wrapper = ops.make_wrapper(
            max_tokens=shapes.max_tokens, max_slots=shapes.num_slots, device=device
        )
        self._ops, self._device = ops, device

    @classmethod
    def of_case(cls, ops: VllmMoEOps, case: Case, device: str) -> VllmMoEInstance:
        return cls(
            ops,
            LayerShapes.of(case),
            dtype=torch_dtype(case.dtype),
            device=device,
            path=case.path,
            sharing=case.sharing,
            add_inputs=case.write is Write.ADD,
        )

    def on_path(self, path: Path) -> VllmMoEInstance:
        """An instance on another path that shares weights and metadata with this one."""
        other = copy(self)
        other.path = path
        return other

    def load(self, slot: int, pool: Pool) -> None:
        self.unload(slot)
        parts = zip(pool.ranks[slot], pool.scales[slot], self.a, self.b, strict=True)
        for part, (rank, scale, a, b) in enumerate(parts):
            a[slot, :, :rank].copy_(pool.a[slot, :, part, :rank])
            b[slot, :, :, :rank].copy_(fold_scale(pool.b[part][slot, :, :, :rank], scale))
        self._enabled[slot] = 1

    def unload(self, slot: int) -> None:
        for weight in (*self.a, *self.b):
            weight[slot].zero_()
        self._enabled[slot] = 0

    def prepare(self, token_slots: Tensor) -> None:
        mapping = token_slots.to(self._device, torch.int64)
        self._wrapper.token_mapping_meta.prepare_tensors(mapping)

    def apply(self, x: Tensor, out: Tensor, routes: Routes) -> Tensor:
        return self.launch(x, out, routes, self.assign(routes))

    def assign(self, routes: Routes) -> Assignment:
        """Alignment of the pairs, where the path has one."""
        tokens = len(routes.topk_ids)
        ids, expert_map = _known_experts(routes)
        unaligned = self._unaligned(routes)
        mapping, sorted_ids, expert_ids, num_post_pad = self._wrapper.moe_lora_align_block_size(
            ids,
            tokens,
            self._block_size(tokens),
            self.shapes.experts,
            self.shapes.num_slots,
            self._enabled,
            expert_map,
            naive_block_assignment=unaligned,
        )
        if not unaligned:
            sorted_ids = sorted_ids.view(self.shapes.num_slots, -1)
            expert_ids = expert_ids.view(self.shapes.num_slots, -1)
        return Assignment(mapping, sorted_ids, expert_ids, num_post_pad)

    def launch(self, x: Tensor, out: Tensor, routes: Routes, assignment: Assignment) -> Tensor:
        """The operator itself, on pairs that have been assigned."""
        tokens, k = routes.topk_ids.shape
        weights = self._ones[:tokens] if routes.weights is None else routes.weights
        self._wrapper.add_lora_fused_moe(
            out.view(tokens, k, out.shape[1]),
            x,
            self._per_expert(self.a),
            self._per_expert(self.b),
            weights,
            assignment.sorted_ids,
            assignment.expert_ids,
            assignment.num_post_pad,
            self.shapes.rank,
            k,
            self._tiles("shrink", tokens),
            self._tiles("expand", tokens),
            self._enabled,
            self.shapes.weighted,
            fully_sharded=self.path is Path.TWO_KERNEL,
            token_lora_mapping=assignment.mapping,
            add_inputs=self.add_inputs,
        )
        return out

    def _unaligned(self, routes: Routes) -> bool:
        if self.path is not Path.PLAN:
            return self.path is Path.SMALL_BATCH
        few = routes.topk_ids.numel() * _SPARSITY <= self.shapes.experts * self.shapes.num_slots
        return few and routes.expert_map is None

    def _tiles(self, kernel: str, tokens: int) -> Mapping[str, Any]:
        w1_shape, w2_shape = self.shapes.base_shapes
        layer = "w2" if self.shapes.weighted else "w13"
        return self._ops.tiles(
            op_type=f"fused_moe_lora_{layer}_{kernel}",
            w1_shape=w1_shape,
            w2_shape=w2_shape,
            rank=self.shapes.rank,
            top_k=self.shapes.top_k,
            # 16-bit activations and weights
            dtype=None,
            M=tokens,
        )

    def _block_size(self, tokens: int) -> int:
        # vLLM aligns once for w13 and w2, with the tile sizes of their base layer
        return int(self._tiles("shrink", tokens).get("BLOCK_SIZE_M") or 64)

    def _per_expert(self, weights: list[Tensor]) -> tuple[Tensor, ...]:
        return tuple(weight.expand(-1, self.shapes.experts, -1, -1) for weight in weights)


def _known_experts(routes: Routes) -> tuple[Tensor, Tensor | None]:
    """Pairs without an expert get an expert that is elsewhere: vLLM's alignment reads the map even
    at a negative id."""
    if routes.expert_map is None:
        return routes.topk_ids, None
    elsewhere = routes.expert_map.new_full((1,), -1)
    nowhere = routes.expert_map.numel()
    ids = torch.where(routes.topk_ids < 0, nowhere, routes.topk_ids)
    return ids.to(torch.int32), torch.cat([routes.expert_map, elsewhere])
