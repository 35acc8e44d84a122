"""Access to the layers of the installed vLLM. Nothing of it is copied here.

Invariant: a package that cannot be used gives a reason, never an exception. The layers are the
package's own, in process groups of one process, which is what a server has on one GPU.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, get_args

import torch
from torch import distributed

from loragate.core.machine import Machine
from loragate.subjects.vllm.moe_package import load_vllm_moe
from loragate.subjects.vllm.package import VllmOps, environment, headline, importing, load_vllm


@dataclass(frozen=True, slots=True)
class VllmLayers:
    """Entry points of vLLM's layers, whose classes cannot be named without the package."""

    ops: VllmOps
    # the modules vllm.config, vllm.model_executor.layers.linear and vllm.forward_context
    config: Any
    linear: Any
    forward_context: Any
    # a function that builds an MoE layer without adapters
    moe_layer: Callable[..., Any]
    # what it calls a choice of experts that is none of its own
    given_routing: Any
    # what a server replaces a layer with: (layer, slots, LoRA config, names of slices) -> layer
    from_layer: Callable[..., Any]
    # LoRAMapping, and PunicaWrapperGPU, which holds the metadata of a step
    mapping: Callable[..., Any]
    wrapper: Callable[..., Any]
    # the ranks that a server may choose for its buffers
    ranks: tuple[int, ...]

    def module(self, name: str) -> Any:
        """A module of the package, named without it."""
        return importlib.import_module(f"vllm.{name}")

    def rank_of_buffers(self, rank: int) -> int:
        """The smallest rank that a server can choose for adapters of a rank."""
        return min(allowed for allowed in self.ranks if allowed >= rank)


def load_vllm_layers(machine: Machine) -> VllmLayers | str:
    """The layers of the package, or the reason why they cannot run here."""
    ops = load_vllm(machine)
    if isinstance(ops, str):
        return ops
    # its wrapper reaches the operators of MoE LoRA as well
    moe = load_vllm_moe(machine)
    if isinstance(moe, str):
        return moe
    try:
        return _load(ops, machine.device)
    except Exception as error:
        return f"vLLM {ops.version}: its layers cannot be built: {headline(error)}"


@cache
def _load(ops: VllmOps, device: str) -> VllmLayers | str:
    with importing(device == "cpu"):
        config: Any = importlib.import_module("vllm.config")
        lora_config: Any = importlib.import_module("vllm.config.lora")
        base_linear: Any = importlib.import_module("vllm.lora.layers.base_linear")
        layer_utils: Any = importlib.import_module("vllm.lora.layers.utils")
        layers: Any = importlib.import_module("vllm.lora.utils")
        wrappers: Any = importlib.import_module("vllm.lora.punica_wrapper.punica_gpu")
        linear: Any = importlib.import_module("vllm.model_executor.layers.linear")
        forward_context: Any = importlib.import_module("vllm.forward_context")
        moe_layer: Any = importlib.import_module("vllm.model_executor.layers.fused_moe.layer")
        moe_config: Any = importlib.import_module("vllm.model_executor.layers.fused_moe.config")
        workspace: Any = importlib.import_module("vllm.v1.worker.workspace")
    if not hasattr(torch.ops.vllm, "lora_linear_async"):
        return "its linear layers were imported while its option for two streams was off"
    if device == "cpu":
        # its form of two streams asks for a platform that has streams; here they are modelled
        for module in (lora_config, base_linear, layer_utils):
            module.current_platform = _ModelledPlatform
    _join_groups_of_one(config, device)
    if not workspace.is_workspace_manager_initialized():
        # its MoE layers share memory for what they compute on the way
        workspace.init_workspace_manager(torch.device(device))
    return VllmLayers(
        ops=ops,
        config=config,
        linear=linear,
        forward_context=forward_context,
        moe_layer=moe_layer.FusedMoE,
        given_routing=moe_config.RoutingMethodType.Custom,
        from_layer=layers.from_layer,
        mapping=layer_utils.LoRAMapping,
        wrapper=wrappers.PunicaWrapperGPU,
        ranks=get_args(lora_config.MaxLoRARanks),
    )


def _join_groups_of_one(config: Any, device: str) -> None:
    """The process groups that its layers ask for their sizes; they communicate with nobody."""
    state: Any = importlib.import_module("vllm.distributed.parallel_state")
    if state.model_parallel_is_initialized():
        return
    default = config.VllmConfig(device_config=config.DeviceConfig(device=device))
    # a machine for tests may have no other network
    with environment({"GLOO_SOCKET_IFNAME": "lo"}), config.set_current_vllm_config(default):
        if not distributed.is_initialized():
            store = distributed.HashStore()  # type: ignore[attr-defined]
            distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
        state.init_distributed_environment(1, 0, local_rank=0, backend="gloo")
        state.initialize_model_parallel(1, 1)


class _ModelledPlatform:
    """What its layers ask of a platform."""

    @staticmethod
    def is_cuda_alike() -> bool:
        return True

    @staticmethod
    def can_update_inplace() -> bool:
        return True
