"""Access to the installed vLLM package for MoE LoRA. Nothing of it is copied here.

Invariant: a package that cannot be used gives a reason, never an exception. On a GPU everything
that runs is the package's own, except for collectives, which are those of a group of one process.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace
from typing import Any

from torch import Tensor

from loragate.core.machine import Machine
from loragate.subjects.vllm.alignment import align_in_torch
from loragate.subjects.vllm.package import headline, importing, load_vllm

_OPERATORS = "vllm.lora.ops.triton_ops.fused_moe_lora_op"
_BASE_TILES = "vllm.model_executor.layers.fused_moe.fused_moe"
# the host code splits columns for that many processors; an H200 has 132
_INTERPRETED_PROCESSORS = 132


@dataclass(frozen=True, slots=True)
class VllmMoEOps:
    """Entry points of vLLM's MoE LoRA."""

    version: str
    # PunicaWrapperGPU, the class through which its layers reach the operators
    wrapper: Callable[..., Any]
    # tile sizes for one launch of the layers, from the tables of the package
    tiles: Callable[..., Mapping[str, int | None]]
    # the operator that the wrapper calls
    fused_moe_lora: Callable[..., None]
    align: Callable[..., None]

    def make_wrapper(self, *, max_tokens: int, max_slots: int, device: str) -> Any:
        """The wrapper of a server with default options."""
        config = SimpleNamespace(max_loras=max_slots, specialize_active_lora=False)
        return self.wrapper(max_tokens, max_tokens, device, lora_config=config)


def load_vllm_moe(machine: Machine) -> VllmMoEOps | str:
    """What MoE LoRA needs of the package, or the reason why it cannot run."""
    dense = load_vllm(machine)
    if isinstance(dense, str):
        return dense
    try:
        return _load(dense.version, machine.interpreted)
    except Exception as error:
        reason = headline(error)
        return f"vLLM {dense.version}: its MoE LoRA cannot be imported: {reason}"


@cache
def _load(version: str, interpreted: bool) -> VllmMoEOps:
    with importing(interpreted):
        operators: Any = importlib.import_module(_OPERATORS)
        wrappers: Any = importlib.import_module("vllm.lora.punica_wrapper.punica_gpu")
        layers: Any = importlib.import_module("vllm.lora.layers.utils")
        names: Any = importlib.import_module("vllm.lora.ops.triton_ops.utils")
        base_tiles: Any = importlib.import_module(_BASE_TILES)
        compiled: Any = importlib.import_module("vllm._custom_ops")
    # vLLM 0.26 reaches its two-kernel path only through layers that are cut over processes
    operators.tensor_model_parallel_all_reduce = _alone
    operators.tensor_model_parallel_all_gather = _alone
    if interpreted:
        operators.current_platform = _InterpretedPlatform
        # the tables of tuned tiles are looked up by the name of a device
        base_tiles.get_moe_configs = _no_tuned_tiles
        compiled.moe_lora_align_block_size = align_in_torch

    def tiles(**launch: Any) -> Mapping[str, int | None]:
        chosen: Mapping[str, int | None] = names._normalize_lora_config_keys(
            layers.try_get_optimal_moe_lora_config(**launch)
        )
        return chosen

    return VllmMoEOps(
        version=version,
        wrapper=wrappers.PunicaWrapperGPU,
        tiles=tiles,
        fused_moe_lora=operators.fused_moe_lora,
        align=compiled.moe_lora_align_block_size,
    )


class _InterpretedPlatform:
    """What the host code of the kernels needs of a platform."""

    @staticmethod
    def num_compute_units(device_id: int | None = None) -> int:
        return _INTERPRETED_PROCESSORS

    @staticmethod
    def is_cuda_alike() -> bool:
        return False


def _no_tuned_tiles(*shape: object, **options: object) -> None:
    return None


def _alone(values: Tensor, *dimension: int) -> Tensor:
    return values
