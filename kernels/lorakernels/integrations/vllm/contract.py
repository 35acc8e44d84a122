"""What the plug-in relies on in vLLM: versions, and names with their parameters.

One table. `check` compares it with the installed vLLM by `inspect` when the plug-in registers, and
tests compare it with the source of each version that was read.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from importlib import import_module
from typing import Any

from packaging.version import InvalidVersion, Version

# the first and the last release that were read, as (major, minor)
OLDEST, NEWEST = (0, 26), (0, 33)
WRAPPER = "vllm.lora.punica_wrapper.punica_gpu.PunicaWrapperGPU"

_GPU = "vllm.lora.punica_wrapper.punica_gpu"
_BASE = "vllm.lora.punica_wrapper.punica_base"
_EXPERTS = (
    "(self, y, x, lora_a_stacked, lora_b_stacked, topk_ids, topk_weights, expert_map, w1, w2, "
    "num_tokens, top_k_num, max_loras, adapter_enabled, local_num_experts, top_k, num_slices, "
    "fully_sharded, use_tuned_config, add_inputs=True, token_lora_mapping=None)"
)
_DOWN = (
    "(self, y, x, lora_a_stacked, lora_b_stacked, topk_weights, sorted_token_ids_lora, "
    "expert_ids_lora, num_tokens_post_padded_lora, token_lora_mapping, num_tokens, w1, w2, "
    "top_k_num, max_loras, adapter_enabled, top_k, fully_sharded, tp_rank, use_tuned_config, "
    "add_inputs=True)"
)


class UnsupportedVllmError(RuntimeError):
    """The installed vLLM is none that the plug-in was made for."""


@dataclass(frozen=True, slots=True)
class Seam:
    """Something of vLLM that the plug-in calls, replaces or reads. `accepted`: the parameters of a
    function, as `parameters_of` writes them, or a field that a data class must have."""

    module: str
    name: str
    accepted: tuple[str, ...]


def _seam(module: str, name: str, *accepted: str) -> Seam:
    return Seam(module, name, accepted)


SEAMS = (
    # replaced or extended
    _seam(
        _GPU,
        "PunicaWrapperGPU.__init__",
        "(self, max_num_batched_tokens, max_batches, device, **kwargs)",
    ),
    _seam(
        _GPU,
        "PunicaWrapperGPU.update_metadata",
        "(self, mapping, lora_index_to_id, max_loras, vocab_size, **kwargs)",
    ),
    _seam(
        _GPU,
        "PunicaWrapperGPU.add_lora_linear",
        "(self, y, x, lora_a_stacked, lora_b_stacked, scale, output_slices, *, buffer=None, "
        "**kwargs)",
    ),
    _seam(
        _GPU,
        "PunicaWrapperGPU.add_lora_logits",
        "(self, y, x, lora_a_stacked, lora_b_stacked, scale, *, buffer=None, **kwargs)",
    ),
    _seam(_GPU, "PunicaWrapperGPU.add_lora_w13", _EXPERTS),
    _seam(_GPU, "PunicaWrapperGPU.add_lora_w2", _DOWN),
    _seam("vllm.lora.layers.base", "BaseLayerWithLoRA.set_mapping", "(self, punica_wrapper)"),
    _seam(
        "vllm.v1.worker.lora_model_runner_mixin",
        "LoRAModelRunnerMixin.maybe_select_dummy_loras",
        "(self, lora_config, num_scheduled_tokens, mapping_type=LoRAMappingType.LANGUAGE, "
        "num_sampled_tokens=None, num_active_loras=0)",
    ),
    _seam(
        "vllm.config.vllm",
        "VllmConfig.compute_hash",
        "(self)",
        "(self, include_version=True)",
    ),
    # called or read
    _seam("vllm.config.vllm", "get_current_vllm_config_or_none", "()"),
    _seam("vllm.lora.punica_wrapper.punica_selector", "get_punica_wrapper", "(*args, **kwargs)"),
    _seam(_BASE, "PunicaWrapperBase.token_lora_indices", "(self)"),
    _seam(_BASE, "PunicaWrapperBase.sampler_indices", "(self)"),
    _seam("vllm.lora.ops.triton_ops.lora_kernel_metadata", "LoRAKernelMeta", "no_lora_flag_cpu"),
    # how layers of experts call the wrapper
    _seam(
        "vllm.model_executor.layers.fused_moe.experts.lora_experts_mixin",
        "LoRAExpertsMixin.apply_w13_lora",
        "(self, lora_context, *, y, x, topk_ids, topk_weights, expert_map, w1, w2, num_tokens, "
        "top_k_num, add_inputs=True, swap_w13_slices=False)",
    ),
    _seam(
        "vllm.model_executor.layers.fused_moe.experts.lora_experts_mixin",
        "LoRAExpertsMixin.apply_w2_lora",
        "(self, lora_context, *, y, x, topk_weights, sorted_token_ids_lora, expert_ids_lora, "
        "num_tokens_post_padded_lora, token_lora_mapping, num_tokens, w1, w2, top_k_num, "
        "add_inputs=True)",
    ),
    _seam("vllm.lora.layers.fused_moe", "FusedMoEWithLoRA.set_mapping", "(self, punica_wrapper)"),
)


def check_version(version: str) -> None:
    """Raises UnsupportedVllmError for a version that was not read."""
    try:
        release = Version(version).release[:2]
    except InvalidVersion:
        release = ()
    if not OLDEST <= release <= NEWEST:
        first, last = (".".join(map(str, bound)) for bound in (OLDEST, NEWEST))
        raise _unsupported(f"vLLM must be of version {first} to {last} (found {version})")


def check_seams() -> None:
    """Raises UnsupportedVllmError for the first name that is not as the table has it."""
    for seam in SEAMS:
        found = _found(seam)
        if not found.intersection(seam.accepted):
            expected = " or ".join(seam.accepted)
            described = ", ".join(sorted(found))
            raise _unsupported(f"{seam.module}.{seam.name} must be {expected} (found {described})")


def parameters_of(function: Callable[..., Any]) -> str:
    """The parameters of a function as its source has them, without annotations."""
    signature = inspect.signature(function)
    plain = [
        parameter.replace(annotation=parameter.empty, default=_shown(parameter.default))
        for parameter in signature.parameters.values()
    ]
    return str(inspect.Signature(plain))


class _Name(str):
    """A default that is written as it is."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def _shown(default: object) -> object:
    # members of enums are written by their names
    kind = type(default)
    members = getattr(kind, "__members__", None)
    return default if members is None else _Name(f"{kind.__name__}.{default.name}")  # type: ignore[attr-defined]


def _found(seam: Seam) -> set[str]:
    """What vLLM has in the place of a seam, in words where it has nothing that can be called."""
    try:
        value: Any = import_module(seam.module)
        for part in seam.name.split("."):
            value = inspect.getattr_static(value, part)
    except ImportError as error:
        return {f"a module that cannot be imported: {error}"}
    except AttributeError:
        return {"nothing of that name"}
    if is_dataclass(value):
        return {field.name for field in fields(value)}
    if isinstance(value, property):
        value = value.fget
    return {parameters_of(getattr(value, "__func__", value))}


def _unsupported(problem: str) -> UnsupportedVllmError:
    return UnsupportedVllmError(
        f"lorakernels does not know this vLLM: {problem}. LORAKERNELS_VLLM=0 leaves vLLM as it is."
    )
