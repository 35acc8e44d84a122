"""The tensors of a step, as a subject gets them. Read docs/subjects.md to add a subject."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Pool:
    """The adapters that are resident in the slots, before any implementation has seen them.

    `a[slot, slice]` is [rank, in_features], `b[slice][slot]` is [slice width, rank]. Only the
    first `ranks[slot][slice]` ranks are live, the others are dead: zero, or NaN for a subject that
    promises not to read them. Delta of a row x with slot s: `scale * (x @ A.T) @ B.T`.

    MoE sites: `a[slot, expert, slice]` is [rank, in_features], `b[slice][slot, expert]` is
    [slice width, rank]. The expert dimension has length 1 where experts share the factor. Ranks
    and scales are those of the adapter, the same for all experts.

    moe_layer: these are gate and up, or up alone, however they lie in the base layer, and `down` is
    a pool of one slice, from the intermediate to the hidden size, with ranks and scales of its own.
    """

    a: Tensor
    b: tuple[Tensor, ...]
    ranks: tuple[tuple[int, ...], ...]
    scales: tuple[tuple[float, ...], ...]
    down: Pool | None = None

    @property
    def num_slots(self) -> int:
        return len(self.ranks)


@dataclass(frozen=True, slots=True)
class Routes:
    """What the router chose for a step, on the machine's device.

    `topk_ids` int32 [tokens, top_k]: the experts of each token, all different unless case.ids is
    repeated; negative where a choice, or token-expert pair, has no expert. `expert_map` int32
    [global experts]: the local id of each expert, -1 for one that is not here; without it ids are
    local. If case.ids is unknown, ids may also lie beyond the last of `num_ids` experts: such a
    pair has no expert either. `weights` fp32 [tokens,
    top_k]: what the delta of each pair is multiplied by, or None. In moe_layer the weights
    multiply the output of each pair, or its gate and up (case.router), and ids are those of the
    whole layer.
    """

    topk_ids: Tensor
    expert_map: Tensor | None = None
    weights: Tensor | None = None
    num_ids: int | None = None


@dataclass(frozen=True, slots=True)
class Batch:
    """One step. `token_slots` is int32 [tokens] on the CPU, -1 for a base row.

    `out` [tokens, out_features] holds the base layer's output; an in-place site adds to it.
    At an MoE site there are `routes`, and `out` has a row for each token-expert pair: row p is
    choice p % top_k of token p // top_k. x has a row for each token, or for each pair. In
    moe_layer both have a row for each token. For embedding x [tokens, 1] are the ids of tokens,
    int32 or int64.
    """

    x: Tensor
    token_slots: Tensor
    out: Tensor
    routes: Routes | None = None


@dataclass(frozen=True, slots=True)
class BaseLayer:
    """The layer without adapters, for lora_linear: weight [out_features, in_features]. For
    gdn_in_proj the weights of all slices above each other, without a bias. For embedding weight
    [in_features, out_features], a row for each id, without a bias."""

    weight: Tensor
    bias: Tensor | None


@dataclass(frozen=True, slots=True)
class BaseExperts(BaseLayer):
    """The whole layer without adapters, for moe_layer: weight [experts, sum(slices), in_features],
    gate and up as case.gate_up says, down [experts, in_features, intermediate]; with
    case.expert_bias bias [experts, sum(slices)], as weight has its rows, and down_bias [experts,
    in_features].

    `scales` of quantised weights, weight and down: fp32 [experts, rows]; a weight is then
    value * scale.
    """

    down: Tensor
    scales: tuple[Tensor, Tensor] | None = None
    down_bias: Tensor | None = None
