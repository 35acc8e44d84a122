"""Which layers of vLLM are served by these kernels, and what that changes of them.

A layer is adopted before any adapter is loaded. Its stacked adapters become views of packed
buffers, into which vLLM loads and unloads in place as before. vLLM's own kernels cannot read such
views, so a layer is adopted as a whole or not at all.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lorakernels.common.slice_stacks import Slices, pack
from lorakernels.common.stacked_weights import MAX_RANK

# a child of vLLM's logger, whose handlers it uses
LOGGER = logging.getLogger("vllm.plugins.lorakernels")

# layers of vLLM 0.26 to 0.33 that call nothing but `add_lora_linear`
LINEAR_LAYERS = frozenset(
    {
        "ColumnParallelLinearWithLoRA",
        "MergedColumnParallelLinearWithLoRA",
        "MergedColumnParallelLinearVariableSliceWithLoRA",
        "QKVParallelLinearWithLoRA",
        "MergedQKVParallelLinearWithLoRA",
        "RowParallelLinearWithLoRA",
        "ReplicatedLinearWithLoRA",
    }
)
LOGITS_LAYERS = frozenset({"LogitsProcessorWithLoRA"})
MOE_LAYERS = frozenset({"FusedMoEWithLoRA", "FusedMoE3DWithLoRA"})
# of a layer; vLLM's largest has four
MAX_SLICES = 16
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


class Adoption:
    """What became of the layers of one wrapper; `log_once` says it in one line."""

    def __init__(self) -> None:
        self.served: Counter[str] = Counter()
        # by class and reason
        self.kept: Counter[tuple[str, str]] = Counter()
        self._is_logged = False

    def note(self, layer: Any, reason: str | None) -> None:
        name = type(layer).__name__
        if reason is None:
            self.served[name] += 1
        else:
            self.kept[name, reason] += 1

    def summary(self) -> str:
        """Every layer, by class."""
        served = ", ".join(f"{count} {name}" for name, count in sorted(self.served.items()))
        kept = "; ".join(
            f"{count} {name} ({reason})" for (name, reason), count in sorted(self.kept.items())
        )
        return f"lorakernels serves {served or 'no layer'}. vLLM's kernels serve {kept or 'none'}."

    def log_once(self) -> None:
        if not self._is_logged:
            self._is_logged = True
            LOGGER.info("%s", self.summary())


def adopt(layer: Any, wrapper: Any) -> Any:
    """Prepare a layer of vLLM for a wrapper with LoraKernelsMethods; the wrapper that the layer
    must use: this one, or vLLM's own where the layer is not adopted."""
    reason = wrapper.refusal or refusal(layer)
    wrapper.adoption.note(layer, reason)
    if reason is not None:
        return wrapper.stock
    if type(layer).__name__ in MOE_LAYERS:
        _adopt_experts(layer, wrapper)
    elif type(layer).__name__ in LINEAR_LAYERS and len(layer.lora_a_stacked) > 1:
        layer.lora_a_stacked, layer.lora_b_stacked = pack(
            layer.lora_a_stacked, layer.lora_b_stacked
        )
    return wrapper


def refusal_of_server(config: Any) -> str | None:
    """Why all layers keep vLLM's kernels, or None. config: a VllmConfig, or None where a wrapper is
    made without one."""
    cache = getattr(config, "cache_config", None)
    if getattr(cache, "kv_sharing_fast_prefill", False):
        # the later layers get the last rows of requests, in graphs that were captured while no more
        # rows were mapped than they have (`fast_prefill_forward` of gemma4.py); a replay would read
        # and write the other mapped rows behind them
        return "KV sharing with fast prefill"
    if getattr(getattr(config, "parallel_config", None), "use_ubatching", False):
        # each of them has rows of its own, and the mapping is that of all
        return "microbatches"
    return None


def refusal(layer: Any) -> str | None:
    """Why a layer keeps vLLM's kernels, or None."""
    name = type(layer).__name__
    if name in MOE_LAYERS:
        if layer.fully_sharded:
            return "fully sharded"
        if layer.use_ep:
            return "expert parallel"
        if layer.moe_config.moe_parallel_config.dp_size > 1:
            # gathered behind the mapping of this rank, by `MoEPrepareAndFinalizeNaiveDPEPModular`
            return "rows of other data parallel ranks"
        return _refusal_of(layer.w13_lora_a_stacked)
    if name in LINEAR_LAYERS:
        return _refusal_of(layer.lora_a_stacked) or _refusal_of_output(layer)
    if name in LOGITS_LAYERS:
        return _refusal_of([layer.lora_a_stacked]) or _refusal_of_output(layer)
    return "of no known class"


def _refusal_of(a: Sequence[Tensor]) -> str | None:
    dtype, rank = a[0].dtype, a[0].shape[2]
    if dtype not in _DTYPES:
        return f"adapters of {dtype}"
    if len(a) > MAX_SLICES:
        return f"{len(a)} slices, above {MAX_SLICES}"
    return f"rank {rank} above {MAX_RANK}" if rank > MAX_RANK else None


def _refusal_of_output(layer: Any) -> str | None:
    """vLLM computes the scores of some routers, and logits if it is told to, in a higher precision
    than that of the adapters."""
    base = getattr(layer, "base_layer", None)
    # a layer that says nothing of its outputs gives those of its weights
    for name in ("out_dtype", "head_dtype", "params_dtype"):
        dtype = getattr(base, name, None)
        if dtype is not None:
            is_ours = dtype == layer.lora_a_stacked[0].dtype
            return None if is_ours else f"outputs of {dtype}"
    return None


def _adopt_experts(layer: Any, wrapper: Any) -> None:
    wrapper.reserve_experts(
        top_k=layer.moe_config.experts_per_token, num_experts=layer.local_num_experts
    )
    old_a, old_b = layer.w13_lora_a_stacked, layer.w13_lora_b_stacked
    if len(old_a) == 1:
        return
    new_a, new_b = pack(old_a, old_b)
    layer.w13_lora_a_stacked, layer.w13_lora_b_stacked = new_a, new_b
    # lists of each adapter's and expert's part, which would keep the old stacks alive
    if isinstance(getattr(layer, "lora_a_stacked", None), list):
        layer.lora_a_stacked = [_moved(part, old_a, new_a) for part in layer.lora_a_stacked]
        layer.lora_b_stacked = [_moved(part, old_b, new_b) for part in layer.lora_b_stacked]


def _moved(part: Tensor, old: Slices, new: Slices) -> Tensor:
    """The place of one adapter and expert in the new stacks, or `part` if it is in none of the
    old ones."""
    storage = part.untyped_storage().data_ptr()
    for before, after in zip(old, new, strict=True):
        if before.untyped_storage().data_ptr() == storage:
            slot, rest = divmod(int(part.storage_offset()), before.stride(0))
            return after[slot, rest // before.stride(1)]
    return part
