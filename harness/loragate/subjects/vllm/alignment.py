"""A substitute in plain torch for vLLM's compiled alignment of token-expert pairs, for a CPU.

The operator exists for CUDA only, while the kernels that read its output also run in the
interpreter. The substitute writes the same tensors according to the operator's documented contract,
with the pairs of an expert in ascending order, which the operator leaves open. It cannot show a
defect of the operator itself, and is never used on a GPU.
"""

from __future__ import annotations

import torch
from torch import Tensor


def align_in_torch(
    topk_ids: Tensor,
    token_lora_mapping: Tensor,
    num_experts: int,
    block_size: int,
    max_loras: int,
    max_num_tokens_padded: int,
    max_num_m_blocks: int,
    sorted_token_ids: Tensor,
    experts_ids: Tensor,
    num_tokens_post_pad: Tensor,
    adapter_enabled: Tensor,
    lora_ids: Tensor,
    expert_map: Tensor | None = None,
) -> None:
    """Arguments and outputs have the names of the operator; int32 tensors on the CPU.

    Rows of slots without tokens, and of disabled slots, are not written.
    """
    experts = _local_experts(topk_ids.flatten(), num_experts, expert_map)
    slots = token_lora_mapping[: len(topk_ids)].repeat_interleave(topk_ids.shape[1])
    for slot in lora_ids.tolist():
        if not 0 <= slot < max_loras or not adapter_enabled[slot]:
            continue
        ids = sorted_token_ids[slot * max_num_tokens_padded :][:max_num_tokens_padded]
        blocks = experts_ids[slot * max_num_m_blocks :][:max_num_m_blocks]
        ids.fill_(topk_ids.numel())
        blocks.fill_(-1)
        end = 0
        for expert in sorted(set(experts[(slots == slot) & (experts >= 0)].tolist())):
            pairs = ((slots == slot) & (experts == expert)).nonzero().flatten()
            ids[end : end + len(pairs)] = pairs.int()
            needed = -(-len(pairs) // block_size)
            blocks[end // block_size :][:needed] = expert
            end += needed * block_size
        num_tokens_post_pad[slot] = end


def _local_experts(ids: Tensor, num_experts: int, expert_map: Tensor | None) -> Tensor:
    """The local expert of each pair, -1 for a pair that is left out."""
    outside = (ids < 0) | (ids >= num_experts)
    known = torch.where(outside, 0, ids).long()
    local = known if expert_map is None else expert_map[known].long()
    return torch.where(outside, -1, local)
