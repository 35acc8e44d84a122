"""Which layer gets which module of an adapter.

Invariant: each module of the adapter belongs to exactly one layer, and each module that the
adapter targets has factors. An adapter whose names do not match would otherwise silently be
served as the base model (vllm #50252).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from lorakernels.adapters.adapter import Adapter
from lorakernels.adapters.errors import AdapterError, hint, listing, printable
from lorakernels.adapters.expert_layout import is_stacked_name
from lorakernels.adapters.expressions import limited_matching
from lorakernels.adapters.peft_targets import TargetRule
from lorakernels.moe.weights import Factors

Bound = dict[str, dict[str, Factors]]
# part name -> the slices of its layer that it covers
LayerParts = Mapping[str, Collection[int]]
# module name -> (layer name, part name)
Homes = dict[str, tuple[str, str]]


def bind(adapter: Adapter, layers: Mapping[str, LayerParts]) -> Bound:
    """Layer name -> {part name -> factors}, with a possibly empty entry for every layer.

    The module of a part has the parent of its layer: part "q_proj" of the layer
    "model.layers.0.self_attn.qkv_proj" is "model.layers.0.self_attn.q_proj", and part
    "experts.3.up_proj" of "model.layers.0.mlp.experts" is "model.layers.0.mlp.experts.3.up_proj".
    Raises AdapterError.
    """
    homes = _homes(layers)
    _refuse_unmatched(adapter, homes)
    bound: Bound = {layer: {} for layer in layers}
    for module, factors in adapter.modules.items():
        layer, part = homes[module]
        bound[layer][part] = factors
    _refuse_missing(adapter, homes, layers, bound)
    return bound


def _homes(layers: Mapping[str, LayerParts]) -> Homes:
    homes: Homes = {}
    for layer, parts in layers.items():
        parent, dot, _ = layer.rpartition(".")
        for part in parts:
            module = f"{parent}{dot}{part}"
            if module in homes:
                other = homes[module][0]
                raise ValueError(f"module {module} must be in one layer (got {other}, {layer})")
            homes[module] = (layer, part)
    return homes


def _refuse_unmatched(adapter: Adapter, homes: Homes) -> None:
    if not adapter.modules:
        raise AdapterError(
            f"adapter {printable(adapter.name)} has no factors: it would be the base model"
        )
    unmatched = adapter.modules.keys() - homes
    if unmatched:
        raise AdapterError(
            f"adapter {printable(adapter.name)} has factors for modules that the model does not "
            f"serve, {len(unmatched)} of {len(adapter.modules)}: "
            f"{listing(unmatched)}{hint(min(unmatched), homes)}"
        )


def _refuse_missing(
    adapter: Adapter, homes: Homes, layers: Mapping[str, LayerParts], bound: Bound
) -> None:
    def replaced(layer: str, part: str) -> bool:
        # a model has either the fused module or its parts, while a list may target both
        slices = layers[layer]
        return any(not set(slices[part]).isdisjoint(slices[other]) for other in bound[layer])

    if adapter.targets is None:
        return
    with limited_matching():
        missing = {
            module
            for module, home in homes.items()
            if _is_wanted(adapter, adapter.targets, module) and not replaced(*home)
        }
    if missing:
        raise AdapterError(
            f"adapter {printable(adapter.name)} has no factors for modules that it targets, "
            f"{len(missing)}: {listing(missing)}{hint(min(missing), adapter.modules)}"
        )


def _is_wanted(adapter: Adapter, targets: TargetRule, module: str) -> bool:
    """Whether the adapter should have factors for a module."""
    stacked = is_stacked_name(module)
    if stacked is None:
        return targets.names_module(module)
    # a model offers its experts one by one and stacked, and an adapter has one of the two; it has
    # neither where experts are parameters, which names of modules cannot match (vllm #47088)
    if adapter.expert_layout is None or adapter.expert_layout.stacked is not stacked:
        return False
    if stacked and targets.parameters:
        return targets.names_parameter(module)
    return targets.names_module(module)
