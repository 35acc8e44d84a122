"""Subject `vllm_lorakernels`: the engine and the layers of the installed vLLM with the plug-in, so
that every case judges adoption, metadata and operators of the plug-in as vLLM drives them.

The deltas are those of the wrapper's methods that linear and MoE layers call. vLLM itself stays as
it is for the subject `vllm`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache, partial
from types import MappingProxyType
from typing import Any

from loragate.core.machine import Machine
from loragate.matrix.case import (
    Bias,
    Case,
    Dtype,
    Execution,
    ExpertMap,
    Parallel,
    Path,
    Ranks,
    RouterWeights,
    Site,
    Source,
    Streams,
    Write,
)
from loragate.protocol import AnyInstance, BaseExperts, BaseLayer, Capabilities
from loragate.subjects.vllm import lora_linear, moe_layer
from loragate.subjects.vllm.engine_arguments import ENGINE_SUPPORTS, NEEDS_GPU, engine_refusal
from loragate.subjects.vllm.layer_package import VllmLayers, load_vllm_layers
from loragate.subjects.vllm.lora_linear import VllmLoRALinear, host_tensors
from loragate.subjects.vllm.moe_layer import VllmMoELayer
from loragate.subjects.vllm.package import installed_version
from loragate.subjects.vllm_lorakernels.deltas import LinearDelta, MoEDelta
from loragate.subjects.vllm_lorakernels.first_slices import FIRST_SLICES
from lorakernels.common.stacked_weights import MAX_RANK
from lorakernels.integrations.vllm.registration import let_layers_adopt


def _moe_delta_refusal(case: Case) -> str | None:
    weighted = case.router is RouterWeights.OUTPUT
    reasons = {
        "its layers of experts that are elsewhere keep vLLM's kernels": (
            case.expert_map is ExpertMap.PARALLEL
        ),
        "w13 reads a row of x for each token, without router weights, and w2 one for each pair, "
        "with them": weighted is not (case.source is Source.PAIR),
        "an absent slice is one of zeros to it, which it stores": (
            case.write is Write.STORE and case.ranks is Ranks.MIXED and len(case.slices) > 1
        ),
    }
    return next((reason for reason, applies in reasons.items() if applies), None)


_REFUSALS: Mapping[Site, Callable[[Case], str | None]] = MappingProxyType(
    {
        Site.DENSE_DELTA: lambda case: None,
        Site.LORA_LINEAR: lora_linear.refusal,
        Site.MOE_DELTA: _moe_delta_refusal,
        Site.MOE_LAYER: moe_layer.refusal,
        Site.ENGINE: engine_refusal,
    }
)


class VllmLoraKernelsSubject:
    name = "vllm_lorakernels"

    def version(self) -> str:
        return installed_version() or "not installed"

    def capabilities(self, machine: Machine) -> Capabilities | str:
        layers = load_vllm_layers(machine)
        if isinstance(layers, str):
            return layers
        return self.describe(machine.interpreted)

    @staticmethod
    def describe(interpreted: bool) -> Capabilities:
        missing = {}
        if interpreted:
            missing[Site.MOE_LAYER] = "its MoE layer calls operators that exist for CUDA only"
            missing[Site.ENGINE] = NEEDS_GPU
        return Capabilities(
            sites=frozenset(_REFUSALS),
            supports={
                **ENGINE_SUPPORTS,
                "dtype": frozenset({Dtype.FP16, Dtype.BF16}),
                "execution": frozenset({Execution.EAGER} if interpreted else Execution),
                "rank": range(1, MAX_RANK + 1),
                "path": frozenset({Path.PLAN}),
                "parallel": frozenset(Parallel),
                # vLLM's layers are cut by the size of their process group
                "tp": range(1, 2),
                "ep": range(1, 2),
                "bias": frozenset(Bias),
                "input_dims": range(2, 4),
                "streams": frozenset(Streams),
            },
            place_invariant=not interpreted,
            rank_per_slice=True,
            folds_scale_into_weights=True,
            pointer_tables=FIRST_SLICES,
            host_tensors=host_tensors,
            refuses=partial(_refuses, missing),
        )

    def engine_target(self, case: Case) -> str:
        return "loragate.subjects.vllm.engine:with_plugin"

    def open(self, case: Case, machine: Machine, base: BaseLayer | None) -> AnyInstance:
        layers = load_vllm_layers(machine)
        assert not isinstance(layers, str), layers
        layers = _with_plug_in(layers)
        if isinstance(base, BaseExperts):
            return VllmMoELayer(layers, case, machine.device, base)
        if base is not None:
            return VllmLoRALinear(layers, case, machine.device, base)
        delta: type[LinearDelta | MoEDelta]
        delta = MoEDelta if case.site is Site.MOE_DELTA else LinearDelta
        return delta(layers, case, machine.device)


def _refuses(missing: Mapping[Site, str], case: Case) -> str | None:
    return missing.get(case.site) or _REFUSALS[case.site](case)


@cache
def _wrapper() -> Any:
    let_layers_adopt()
    module: Any = importlib.import_module("lorakernels.integrations.vllm.wrapper")
    return module.LoraKernelsWrapper


def _with_plug_in(layers: VllmLayers) -> VllmLayers:
    return replace(layers, wrapper=_wrapper())
