"""Puts layers that serve adapters in place of linears, experts and the embedding of a transformers
model.

Invariant: everything is checked before the first module is replaced. Each weight exists once
afterwards: a layer takes the place of its modules before the next layer is built, and a weight
that is not packed is shared, such as that of a head that is tied to the embedding. A module that
this file does not know is refused, because an adapter for it would silently have no effect.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    PreTrainedModel,
    Qwen3ForCausalLM,
    Qwen3MoeForCausalLM,
    Qwen3NextForCausalLM,
)
from transformers.models.qwen3 import modeling_qwen3 as qwen3
from transformers.models.qwen3_moe import modeling_qwen3_moe as qwen3_moe
from transformers.models.qwen3_next import modeling_qwen3_next as qwen3_next

from lorakernels.common.stacked_weights import DTYPES
from lorakernels.layers.embedding import LoRAEmbedding
from lorakernels.layers.gate_up import GateUp
from lorakernels.layers.gdn import DeltaNetHeads, GatedDeltaNetInputProjection
from lorakernels.layers.linear import LoRALinear
from lorakernels.layers.moe import FusedMoELoRA
from lorakernels.layers.partition import Slice
from lorakernels.serving.buffers import LoRALayer
from lorakernels.serving.checks import check_calls
from lorakernels.serving.projections import (
    BufferPlace,
    Columns,
    PackedProjection,
    ServedEmbedding,
    ServedExperts,
)

MODELS = (Qwen3ForCausalLM, Qwen3MoeForCausalLM, Qwen3NextForCausalLM)
_EXPERTS = (qwen3_moe.Qwen3MoeExperts, qwen3_next.Qwen3NextExperts)
_DELTA_NET = qwen3_next.Qwen3NextGatedDeltaNet
_INPUT = ("in_proj_qkvz", "in_proj_ba")

_ATTENTION = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "o_proj": ("o_proj",)}
_MLP = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
# type of a module -> name of a layer in it -> the linears that the layer replaces, in the order in
# which the model calls them
_LINEARS: Mapping[type[nn.Module], Mapping[str, tuple[str, ...]]] = {
    qwen3.Qwen3Attention: _ATTENTION,
    qwen3_moe.Qwen3MoeAttention: _ATTENTION,
    qwen3_next.Qwen3NextAttention: _ATTENTION,
    qwen3.Qwen3MLP: _MLP,
    qwen3_moe.Qwen3MoeMLP: _MLP,
    qwen3_next.Qwen3NextMLP: _MLP,
    qwen3_next.Qwen3NextSparseMoeBlock: {"shared_expert_gate": ("shared_expert_gate",)},
    _DELTA_NET: {"in_proj": _INPUT, "out_proj": ("out_proj",)},
}
# modules with weights that stay as they are
_KEPT = (
    nn.Embedding,
    nn.Conv1d,
    qwen3.Qwen3RMSNorm,
    qwen3_moe.Qwen3MoeRMSNorm,
    qwen3_moe.Qwen3MoeTopKRouter,
    qwen3_next.Qwen3NextRMSNorm,
    qwen3_next.Qwen3NextRMSNormGated,
    qwen3_next.Qwen3NextTopKRouter,
    _DELTA_NET,
)


@dataclass(frozen=True, slots=True)
class Replaced:
    """The layers of a model by name, as AdapterSlots takes them, and where they find buffers."""

    layers: Mapping[str, LoRALayer]
    place: BufferPlace


@dataclass(frozen=True, slots=True)
class _Site:
    """A layer to be: its parent, its name there, and the modules of the parent that it replaces."""

    parent: str
    name: str
    members: tuple[str, ...]

    @property
    def path(self) -> str:
        return f"{self.parent}.{self.name}" if self.parent else self.name

    def member(self, index: int) -> str:
        return f"{self.parent}.{self.members[index]}" if self.parent else self.members[index]


_EMBEDDING = _Site("model", "embed_tokens", ("embed_tokens",))


def replace_layers(
    model: PreTrainedModel,
    *,
    num_slots: int,
    rank: int,
    lm_head: bool = False,
    embed_tokens: bool = False,
) -> Replaced:
    """Replace, in place, the linears, experts and delta net inputs of a Qwen3, Qwen3-MoE or
    Qwen3-Next model, with `num_slots` slots of up to `rank` ranks each.

    Adapters name the modules of the original model. The head and the embedding are replaced on
    request only. Raises ValueError that names the module, with the model unchanged.
    """
    if type(model) not in MODELS:
        known = ", ".join(known.__name__ for known in MODELS)
        raise ValueError(f"model must be one of {known} (got {type(model).__name__})")
    sites = list(_sites(model))
    if lm_head:
        sites.append(_Site("", "lm_head", ("lm_head",)))
    if embed_tokens:
        sites.append(_EMBEDDING)
    for site in sites:
        _check(model, site)
    _refuse_unknown(model, sites)
    _check_alike(model, sites)
    place, layers = BufferPlace(), {}
    for site in sites:
        layers[site.path] = _replace(model, site, place, num_slots, rank)
    return Replaced(layers, place)


def _sites(model: PreTrainedModel) -> Iterator[_Site]:
    for name, module in model.named_modules():
        # a subclass computes something else
        if type(module) in _EXPERTS:
            parent, _, own = name.rpartition(".")
            yield _Site(parent, own, (own,))
        for layer, members in _LINEARS.get(type(module), {}).items():
            yield _Site(name, layer, members)


def _check(model: PreTrainedModel, site: _Site) -> None:
    parent = model.get_submodule(site.parent)
    modules = [getattr(parent, member, None) for member in site.members]
    for index, module in enumerate(modules):
        check_calls(site.member(index), module)
    if type(modules[0]) in _EXPERTS:
        _check_experts(site.path, modules[0])
        return
    if site is _EMBEDDING:
        _check_embedding(site.path, modules[0])
        return
    linears: list[nn.Linear] = []
    for index, module in enumerate(modules):
        # a subclass computes something else, such as a product of quantised weights
        if type(module) is not nn.Linear:
            raise ValueError(
                f"{site.member(index)} must be a torch.nn.Linear (got {type(module).__name__})"
            )
        linears.append(module)
    first = linears[0]
    for index, linear in enumerate(linears):
        if _like(linear) != _like(first):
            raise ValueError(
                f"{site.member(index)} must be like {site.member(0)}, with which it is packed: "
                f"{_like(first)} (got {_like(linear)})"
            )
    if first.weight.is_meta:
        raise ValueError(f"{site.member(0)} must have weights (they are on the meta device)")
    if site.members == _INPUT and first.bias is not None:
        raise ValueError(f"{site.member(0)} must have no bias")


def _like(linear: nn.Linear) -> str:
    weight = linear.weight
    bias = "no bias" if linear.bias is None else "a bias"
    return f"{linear.in_features} inputs, {bias}, {weight.dtype} on {weight.device}"


def _check_alike(model: PreTrainedModel, sites: list[_Site]) -> None:
    """All weights that are replaced have one of the dtypes of adapters, and are on one device."""
    first: Tensor | None = None
    for site in sites:
        for index in range(len(site.members)):
            member = model.get_submodule(site.member(index))
            for weight in member.parameters(recurse=False):
                first = weight if first is None else first
                if weight.dtype not in DTYPES:
                    raise ValueError(
                        f"{site.member(index)} must be float16, bfloat16 or float32 "
                        f"(got {weight.dtype})"
                    )
                if (weight.dtype, weight.device) != (first.dtype, first.device):
                    raise ValueError(
                        f"{site.member(index)} must be {first.dtype} on {first.device} like the "
                        f"layers before it (got {weight.dtype} on {weight.device})"
                    )


def _check_experts(name: str, experts: Any) -> None:
    """FusedMoELoRA computes down(silu(gate(x)) * up(x)), with gate above up."""
    act = experts.config.hidden_act
    if act != "silu":
        raise ValueError(f"{name} must have the activation silu (got {act})")
    shapes = tuple(experts.gate_up_proj.shape), tuple(experts.down_proj.shape)
    e, h, i = experts.num_experts, experts.hidden_dim, experts.intermediate_dim
    if shapes != ((e, 2 * i, h), (e, h, i)):
        raise ValueError(
            f"{name} must have gate_up_proj [{e}, {2 * i}, {h}] and down_proj [{e}, {h}, {i}] "
            f"(got {list(shapes[0])} and {list(shapes[1])})"
        )
    if experts.gate_up_proj.is_meta:
        raise ValueError(f"{name} must have weights (they are on the meta device)")


def _check_embedding(name: str, module: Any) -> None:
    # a subclass computes something else, such as scaled rows
    if type(module) is not nn.Embedding:
        raise ValueError(f"{name} must be a torch.nn.Embedding (got {type(module).__name__})")
    if module.max_norm is not None:
        raise ValueError(f"{name} must have no max_norm (got {module.max_norm})")
    if module.weight.is_meta:
        raise ValueError(f"{name} must have weights (they are on the meta device)")


def _refuse_unknown(model: PreTrainedModel, sites: list[_Site]) -> None:
    replaced = {site.member(index) for site in sites for index in range(len(site.members))}
    for name, module in model.named_modules():
        if name in replaced or name == "lm_head" or type(module) in _KEPT:
            continue
        if isinstance(module, nn.Linear) or any(True for _ in module.parameters(recurse=False)):
            raise ValueError(
                f"{name}: a {type(module).__name__} here is not known to {type(model).__name__}"
            )


def _replace(
    model: PreTrainedModel, site: _Site, place: BufferPlace, num_slots: int, rank: int
) -> LoRALayer:
    parent = model.get_submodule(site.parent)
    first = getattr(parent, site.members[0])
    if type(first) in _EXPERTS:
        layer = FusedMoELoRA(
            first.gate_up_proj,
            first.down_proj,
            gate_up=GateUp.HALVES,
            num_slots=num_slots,
            rank=rank,
        )
        setattr(parent, site.name, ServedExperts(layer, place))
        return layer
    if site is _EMBEDDING:
        tokens = LoRAEmbedding(
            first.weight.detach(), num_slots=num_slots, rank=rank, name=site.name
        )
        setattr(parent, site.name, ServedEmbedding(tokens, place))
        return tokens
    projection = _delta_net_input if site.members == _INPUT else _packed_linear
    packed = PackedProjection(
        site.path, site.members, projection(parent, site.members, num_slots, rank), place
    )
    for index, member in enumerate(site.members):
        setattr(parent, member, Columns(packed, index))
    # under a name of its own, so that `to`, `parameters` and the like reach the layer
    parent.add_module(f"packed_{site.name}", packed)
    return packed.layer


def _packed_linear(
    parent: nn.Module, members: tuple[str, ...], num_slots: int, rank: int
) -> LoRALinear:
    linears = [getattr(parent, member) for member in members]
    alone = len(linears) == 1
    weights, biases = [x.weight.detach() for x in linears], [x.bias for x in linears]
    bias = None
    if biases[0] is not None:
        bias = biases[0].detach() if alone else torch.cat([b.detach() for b in biases])
    return LoRALinear(
        weights[0] if alone else torch.cat(weights),
        bias,
        slices=[Slice(m, x.out_features) for m, x in zip(members, linears, strict=True)],
        num_slots=num_slots,
        rank=rank,
    )


def _delta_net_input(
    parent: Any, members: tuple[str, ...], num_slots: int, rank: int
) -> GatedDeltaNetInputProjection:
    heads = DeltaNetHeads(
        key_heads=parent.num_k_heads,
        value_heads=parent.num_v_heads,
        key_size=parent.head_k_dim,
        value_size=parent.head_v_dim,
    )
    qkvz, ba = (getattr(parent, member).weight.detach() for member in members)
    return GatedDeltaNetInputProjection(
        qkvz, ba, modules=heads.grouped(), num_slots=num_slots, rank=rank
    )
