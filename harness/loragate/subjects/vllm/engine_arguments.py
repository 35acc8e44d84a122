"""The arguments of vLLM's `LLM` for a case. Pure; names and values are those of 0.26."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any

from loragate.engine.order import EngineOrder
from loragate.matrix.case import Case, Dtype, Streams
from loragate.matrix.engine_case import (
    Active,
    Ends,
    Graphs,
    Logprobs,
    Model,
    Prefill,
    PrefixCaching,
    Requests,
    Specialize,
    Speculation,
    Targets,
    Weights,
)

NEEDS_GPU = "vLLM's engine needs a GPU"
ENGINE_SUPPORTS: Mapping[str, Collection[object]] = MappingProxyType(
    {
        "model": frozenset(Model),
        "speculation": frozenset(Speculation),
        "graphs": frozenset(Graphs),
        "specialize": frozenset(Specialize),
        "active": frozenset(Active),
        "prefix_caching": frozenset(PrefixCaching),
        "prefill": frozenset(Prefill),
        "targets": frozenset(Targets),
        "logprobs": frozenset(Logprobs),
        "requests": frozenset(Requests),
        "ends": frozenset(Ends),
        "weights": frozenset(Weights),
    }
)
# variables of all engines, which must be set before anything of vLLM is imported
ENVIRONMENT: Mapping[str, str] = MappingProxyType(
    {
        # the engine has a process of its own already, and is asked there which kernels ran
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        # a package of quantised kernels, which no case has: each import of it would compile its
        # tools anew in two processes, for a third of the time of a trial
        "HUMMING_DISABLE_PARALLEL_BUILD": "1",
    }
)
# below those that Linux gives away by itself: vLLM takes the first one that is free from here on,
# and listens on it much later
_FIRST_PORT, _PORTS = 20_000, 10_000
NUM_DRAFTS = 3
# the ranks that max_lora_rank may have
_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
_DTYPES = {Dtype.FP16: "float16", Dtype.BF16: "bfloat16", Dtype.FP32: "float32"}
_GRAPH_MODES = {
    Graphs.NONE: "NONE",
    Graphs.PIECEWISE: "PIECEWISE",
    Graphs.FULL: "FULL",
    Graphs.FULL_DECODE: "FULL_DECODE_ONLY",
}
# of drafts that come from a folder
_METHODS = {Speculation.DRAFT_MODEL: "draft_model", Speculation.EAGLE: "eagle3"}
# of a tiny model: enough for all requests of a case
_CACHE_BYTES = 1 << 28
_BLOCK = 16
_MEMORY_SHARE = 0.05


def engine_refusal(case: Case) -> str | None:
    """Why a case of engines is not run with vLLM, or None."""
    if case.model is not Model.HYBRID:
        return None
    if case.speculation is not Speculation.MTP:
        # kernels of delta nets are compiled and tuned when an engine starts
        return "it takes minutes to start with a hybrid model: only cases with mtp are run"
    if case.prefix_caching is PrefixCaching.ON:
        # blocks are as large as a state, and a step must take a block or more
        return "it keeps prefixes of delta nets in blocks of several hundred tokens"
    return None


def engine_arguments(order: EngineOrder) -> dict[str, Any]:
    """Keyword arguments of `vllm.LLM`."""
    case = order.case
    whole = order.max_length * order.max_requests
    chunked = case.prefill is Prefill.CHUNKED
    arguments: dict[str, Any] = {
        "model": str(order.model),
        "skip_tokenizer_init": True,
        "seed": 0,
        "dtype": _DTYPES[case.dtype],
        "max_model_len": order.max_length + NUM_DRAFTS,
        "max_num_seqs": order.max_requests,
        # a step has a token and its drafts for each request; a prompt has more than a block
        "max_num_batched_tokens": max(_BLOCK, (1 + NUM_DRAFTS) * order.max_requests)
        if chunked
        else max(whole, order.max_length + NUM_DRAFTS),
        "enable_chunked_prefill": chunked,
        "enable_prefix_caching": case.prefix_caching is PrefixCaching.ON,
        "block_size": _BLOCK,
        "kv_cache_memory_bytes": _CACHE_BYTES,
        # asked for at the start although the size of the cache is given; other cases share the GPU
        "gpu_memory_utilization": _MEMORY_SHARE,
        "enable_lora": True,
        "max_loras": case.slots,
        "max_lora_rank": next(rank for rank in _RANKS if rank >= case.rank),
        "max_cpu_loras": max(case.slots, order.num_adapters),
        "specialize_active_lora": case.specialize is Specialize.ON,
        "enforce_eager": case.graphs is Graphs.NONE,
        # its counters are read afterwards
        "disable_log_stats": False,
    }
    if case.graphs is not Graphs.NONE:
        arguments["compilation_config"] = {"cudagraph_mode": _GRAPH_MODES[case.graphs]}
    if case.model is Model.HYBRID:
        # on Hopper vLLM would take kernels that have to be compiled first, by nvcc
        arguments["gdn_prefill_backend"] = "triton"
    speculative = _speculative(order)
    return arguments | ({"speculative_config": speculative} if speculative else {})


def environment(order: EngineOrder, *, plugin: bool, process: int) -> dict[str, str]:
    """Variables that must be set before vLLM reads its options. `process`: the number of that of
    the engine, beside which others start."""
    dual = order.case.streams is Streams.DUAL
    return {
        **ENVIRONMENT,
        "VLLM_PORT": str(_FIRST_PORT + process % _PORTS),
        "VLLM_LORA_ENABLE_DUAL_STREAM": str(int(dual)),
        "LORAKERNELS_VLLM": str(int(plugin)),
    }


def _speculative(order: EngineOrder) -> dict[str, Any] | None:
    match order.case.speculation:
        case Speculation.NGRAM:
            return {
                "method": "ngram",
                "num_speculative_tokens": NUM_DRAFTS,
                "prompt_lookup_max": 3,
                "prompt_lookup_min": 1,
            }
        case Speculation.DRAFT_MODEL | Speculation.EAGLE:
            return {
                "method": _METHODS[order.case.speculation],
                "model": str(order.drafts),
                "num_speculative_tokens": NUM_DRAFTS,
            }
        case Speculation.MTP:
            # the layer is in the folder of the model; a second draft is the same layer's
            return {"method": "mtp", "num_speculative_tokens": NUM_DRAFTS}
    return None
