"""One launch of vLLM's MoE LoRA on given weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from loragate.subjects.vllm.moe_package import VllmMoEOps

BLOCK = 16
_BLOCK_N, _BLOCK_K = 16, 32
# of a shrink or an expand, as the wrapper takes them
_CONFIG = {
    "BLOCK_SIZE_M": BLOCK,
    "BLOCK_SIZE_N": _BLOCK_N,
    "BLOCK_SIZE_K": _BLOCK_K,
    "GROUP_SIZE_M": 1,
    "NUM_WARPS": 4,
    "NUM_STAGES": 3,
    "SPLIT_K": 1,
}


class Way(Enum):
    """The path that the inputs make the dispatcher take."""

    # pairs without alignment; few of a low rank go to the small-batch kernel
    UNALIGNED = "without alignment"
    ONE_SHOT = "one-shot"
    # what a layer with fully sharded adapters runs
    TWO_KERNEL = "two-kernel"


@dataclass(frozen=True, slots=True)
class Launch:
    """`a[slice]` [slots, experts, rank, in_features], `b[slice]` [slots, experts, width, rank]."""

    ops: VllmMoEOps
    wrapper: Any
    a: Sequence[Tensor]
    b: Sequence[Tensor]

    @classmethod
    def of(cls, ops: VllmMoEOps, a: Sequence[Tensor], b: Sequence[Tensor], rows: int) -> Launch:
        """For steps of up to `rows` tokens."""
        wrapper = ops.make_wrapper(max_tokens=rows, max_slots=a[0].shape[0], device=_device(a))
        return cls(ops, wrapper, a, b)

    def prepare(self, slots: Sequence[int]) -> None:
        mapping = torch.tensor(slots, dtype=torch.int64, device=_device(self.a))
        self.wrapper.token_mapping_meta.prepare_tensors(mapping)

    def assign(self, topk_ids: Tensor, way: Way, mapping: Tensor | None = None) -> tuple[Any, ...]:
        """Mapping, sorted ids, expert ids and padded lengths; a row for each slot. `mapping`: the
        slots of these rows, where they are not those of the step."""
        slots, experts = self.a[0].shape[:2]
        found, sorted_ids, expert_ids, post_pad = self.wrapper.moe_lora_align_block_size(
            topk_ids,
            len(topk_ids),
            BLOCK,
            experts,
            slots,
            self.enabled,
            naive_block_assignment=way is Way.UNALIGNED,
            token_lora_mapping=mapping,
        )
        if sorted_ids is not None:
            sorted_ids, expert_ids = sorted_ids.view(slots, -1), expert_ids.view(slots, -1)
        return found, sorted_ids, expert_ids, post_pad

    def run(
        self,
        way: Way,
        x: Tensor,
        out: Tensor,
        topk_ids: Tensor,
        *,
        weights: Tensor | None = None,
        add_inputs: bool = True,
        offset: int = 0,
        shrink_block_n: int = _BLOCK_N,
    ) -> None:
        """Call the operator, without the host checks of its wrapper. `out` is [tokens, top_k,
        columns]; with `weights` x has a row for each pair of token and expert."""
        meta = self.wrapper.token_mapping_meta.meta_args(len(topk_ids), False)
        mapping, sorted_ids, expert_ids, post_pad = self.assign(topk_ids, way)
        # after the tile: group size, warps, stages and splits
        rest = (_BLOCK_K, 1, 4, 3, 1)
        self.ops.fused_moe_lora(
            out,
            x,
            list(self.a),
            list(self.b),
            torch.ones(topk_ids.shape, device=x.device) if weights is None else weights,
            sorted_ids,
            expert_ids,
            post_pad,
            mapping,
            self.a[0].shape[2],
            topk_ids.shape[1],
            meta[4],
            meta[6],
            self.enabled,
            *(BLOCK, shrink_block_n, *rest),
            *(BLOCK, _BLOCK_N, *rest),
            weights is not None,
            way is Way.TWO_KERNEL,
            offset,
            add_inputs,
        )

    def run_mapped(self, mapping: Tensor, x: Tensor, out: Tensor, topk_ids: Tensor) -> None:
        """Call the method of the wrapper, with its host checks, as experts do whose rows come from
        other ranks with a mapping of their own: always aligned."""
        mapping, sorted_ids, expert_ids, post_pad = self.assign(topk_ids, Way.ONE_SHOT, mapping)
        self.wrapper.add_lora_fused_moe(
            out,
            x,
            tuple(self.a),
            tuple(self.b),
            torch.ones(topk_ids.shape, device=x.device),
            sorted_ids,
            expert_ids,
            post_pad,
            self.a[0].shape[2],
            topk_ids.shape[1],
            _CONFIG,
            _CONFIG,
            self.enabled,
            token_lora_mapping=mapping,
        )

    @property
    def enabled(self) -> Tensor:
        return torch.ones(self.a[0].shape[0] + 1, dtype=torch.int32, device=_device(self.a))


def _device(weights: Sequence[Tensor]) -> str:
    return weights[0].device.type
