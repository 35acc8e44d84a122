"""What vLLM is asked for by `bench engine`: the arguments of its `LLM`. Pure; those of 0.26."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from loragate.bench.engine_rows import (
    ADAPTERS,
    BATCHED_TOKENS,
    DECODE_BATCHES,
    LAYERS,
    MAX_LENGTH,
    MAX_REQUESTS,
    Serving,
)
from loragate.bench.graphs_rows import MODELS, RANK
from loragate.engine.order import EngineOrder
from loragate.matrix.case import Case, Dtype, Site
from loragate.matrix.engine_case import Graphs, Model, Prefill
from loragate.subjects.vllm.engine_arguments import engine_arguments

_OF_ADAPTERS = frozenset(
    {"enable_lora", "max_loras", "max_lora_rank", "max_cpu_loras", "specialize_active_lora"}
)
_BYTES_OF_BF16 = 2


def order_of(model: Path) -> EngineOrder:
    """The order for the model in a folder that has its name."""
    case = Case(
        site=Site.ENGINE,
        dtype=Dtype.BF16,
        rank=RANK,
        slots=ADAPTERS,
        model=Model.MOE if MODELS[model.name].experts else Model.DENSE,
        # full graphs of mixed batches are wrong in 0.26, with the runner that MoE models get
        graphs=Graphs.FULL_DECODE,
        prefill=Prefill.CHUNKED,
    )
    return EngineOrder(
        case=case,
        model=model,
        drafts=None,
        device="cuda",
        max_length=MAX_LENGTH,
        max_requests=MAX_REQUESTS,
        num_adapters=ADAPTERS,
    )


def arguments_of(order: EngineOrder, serving: Serving) -> dict[str, Any]:
    """Keyword arguments of `vllm.LLM`: those of the gate for such a case, but for a model without
    weights and for batches of another size."""
    arguments = engine_arguments(order) | {
        "load_format": "dummy",
        "max_num_batched_tokens": BATCHED_TOKENS,
        # a cache for all requests at once, and no more: three engines share the device
        "kv_cache_memory_bytes": _cache_bytes(order),
        "gpu_memory_utilization": 0.05,
        "disable_log_stats": True,
    }
    arguments["compilation_config"] |= {"cudagraph_capture_sizes": list(DECODE_BATCHES)}
    if serving is Serving.BASE:
        return {name: value for name, value in arguments.items() if name not in _OF_ADAPTERS}
    return arguments


def _cache_bytes(order: EngineOrder) -> int:
    name = order.model.name
    keys_and_values = sum(MODELS[name].qkv[1:]) * LAYERS[name] * _BYTES_OF_BF16
    return keys_and_values * order.max_requests * order.max_length
