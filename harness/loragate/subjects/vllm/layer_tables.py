"""What lies behind the tables of addresses that vLLM's kernels load: the stacked weights of a
layer, which no kernel writes.

A table belongs to the layer whose weights have these addresses; an instance has one layer. That
kernels of an MoE layer get A of both of its products here is more than one launch reads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from torch import Tensor

_Behind = Callable[[Any, Tensor], Sequence[Tensor]]


def _a(instance: Any, table: Tensor) -> Sequence[Tensor]:
    layer = instance.layer
    if hasattr(layer, "w13_lora_a_stacked"):
        return [*layer.w13_lora_a_stacked, *layer.w2_lora_a_stacked]
    return list(layer.lora_a_stacked)


def _b(instance: Any, table: Tensor) -> Sequence[Tensor]:
    layer = instance.layer
    if hasattr(layer, "w13_lora_b_stacked"):
        return [*layer.w13_lora_b_stacked, *layer.w2_lora_b_stacked]
    return list(layer.lora_b_stacked)


# by the names of a kernel and of its argument
POINTER_TABLES: Mapping[tuple[str, str], _Behind] = MappingProxyType(
    {
        ("_lora_shrink_kernel", "lora_ptr"): _a,
        ("_lora_expand_kernel", "lora_ptr"): _b,
        ("_fused_moe_lora_one_shot_kernel", "A_ptrs"): _a,
        ("_fused_moe_lora_one_shot_kernel", "B_ptrs"): _b,
        ("_fused_moe_lora_small_batch_kernel", "A_ptrs"): _a,
        ("_fused_moe_lora_small_batch_kernel", "B_ptrs"): _b,
    }
)
