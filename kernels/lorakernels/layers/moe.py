"""A mixture-of-experts layer that serves many adapters at once, one for each row of the batch.

Invariant: the layer is built and loaded from whole tensors and copies its own part of them, so
that the rest can be freed; only a tensor that is neither cut nor reordered is shared. Neither the
base weights nor an adapter are ever written to. An adapter is checked and cut completely before its
slot changes, and the slot is emptied before the adapter is loaded. Adapters are never applied to
quantised activations (vllm #42120).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lorakernels.batch.metadata import BatchMetadata
from lorakernels.common.choices import check_choice
from lorakernels.common.quantised import Quantised
from lorakernels.layers.expert_packing import ExpertParts, stage_experts
from lorakernels.layers.expert_placement import ExpertPlacement
from lorakernels.layers.expert_routing import ExpertRouting
from lorakernels.layers.gate_up import GateUp
from lorakernels.layers.moe_partition import MoERank, cut_expert_ranks, cut_moe
from lorakernels.layers.moe_scratch import MoEScratch
from lorakernels.layers.moe_shared import add_shared
from lorakernels.layers.moe_weights import (
    Weight,
    check_bias,
    expert_packing,
    layer_activation,
    layer_dtype,
    like_rows,
    take_biases,
    take_w2,
    take_w13,
    weight_of,
)
from lorakernels.layers.partition import LoRASharding, whole
from lorakernels.layers.sharding import check_sharding
from lorakernels.moe.align.metadata import PairMetadata
from lorakernels.moe.layer.check import check_biases, check_pairs
from lorakernels.moe.layer.forms import MoEForm, sharded_form
from lorakernels.moe.layer.ops import (
    Activation,
    ExpertLoRA,
    RouterWeight,
    run_experts,
)
from lorakernels.moe.rank_shards import RankShardedExperts
from lorakernels.moe.weights import ExpertFactors, ExpertWeights
from lorakernels.runtime.collectives import Collective, number_of
from lorakernels.runtime.device import keep_address

__all__ = ["GATED", "FusedMoELoRA", "MoEScratch"]

GATED = ("gate_proj", "up_proj", "down_proj")
Staged = tuple[ExpertFactors | None, ...]


class FusedMoELoRA(nn.Module):
    """sum over the chosen experts e of w_e * down_e(act(gate_e(x), up_e(x))), where each of the
    three projections adds its bias and the delta of the row's slot and of the expert.

    w13 [experts, 2 * intermediate, hidden], or [experts, intermediate, hidden] without a gate; w2
    [experts, hidden, intermediate]; both of the whole layer, of which a rank keeps its part, as of
    the biases, w13_bias [experts, rows of w13] and w2_bias [experts, hidden]. `gate_up` says how
    gate and up lie in w13, in its bias and in adapters that have one module for both: None is
    HALVES, and is refused with a bias or an activation. `dtype` is that of activations, adapters
    and biases; it is needed only where the weights are quantised. `projections` are the names of
    gate, up and down in an adapter, or of up and down. `activation` None is SiLU. With
    `shared_outer` the A of gate and up and the B of down are kept once, for all experts, and
    adapters must share them. `placement` says which experts each rank holds, in runs if it is None;
    a rank has the adapters' factors of its experts in all their places. `sharding` RANK cuts A of
    gate and up by rank, and B of down by columns, over `collective`: the `tp_size` ranks that share
    the experts; `rank` is then rounded up to a multiple of tp_size. Raises ValueError.
    """

    def __init__(
        self,
        w13: Weight,
        w2: Weight,
        *,
        num_slots: int,
        rank: int,
        gate_up: GateUp | None = None,
        w13_bias: Tensor | None = None,
        w2_bias: Tensor | None = None,
        activation: Activation | None = None,
        dtype: torch.dtype | None = None,
        projections: Sequence[str] = GATED,
        shared_outer: bool = False,
        router_weight: RouterWeight = RouterWeight.ON_OUTPUT,
        place: MoERank | None = None,
        placement: ExpertPlacement | None = None,
        ids_name_places: bool = False,
        padded_intermediate: int | None = None,
        sharding: LoRASharding = LoRASharding.BASE,
        collective: Collective | None = None,
    ) -> None:
        super().__init__()
        is_usual = activation is None and w13_bias is None and w2_bias is None
        self.packing = expert_packing(w13, w2, tuple(projections), gate_up, is_usual=is_usual)
        check_choice("router_weight", router_weight, RouterWeight)
        self.router_weight, self.shared_outer = router_weight, shared_outer
        self.place = place or MoERank()
        self.dtype = layer_dtype(w13, dtype)
        is_gated = self.packing.gate_up is not None
        self.activation = layer_activation(activation, is_gated=is_gated)
        check_biases(router_weight, w13_bias, w2_bias)
        check_bias("w13_bias", w13_bias, w13, self.dtype)
        check_bias("w2_bias", w2_bias, w2, self.dtype)
        num_experts, intermediate = self.packing.num_experts, self.packing.intermediate
        placement = placement or ExpertPlacement.in_runs(num_experts, self.place.ep_size)
        self.cut = cut_moe(
            num_experts,
            intermediate,
            self.place,
            padded_intermediate=padded_intermediate,
            placement=placement,
        )
        values13, scales13 = take_w13(self.packing, self.cut, w13)
        values2, scales2 = take_w2(self.packing, self.cut, w2)
        self.w13_scales = None if scales13 is None else keep_address(scales13)
        self.w2_scales = None if scales2 is None else keep_address(scales2)
        self.w13, self.w2 = _parameter(values13), _parameter(values2)
        biases = take_biases(self.packing, self.cut, w13_bias, w2_bias)
        self.w13_bias, self.w2_bias = (b if b is None else _parameter(b) for b in biases)
        self.routing = ExpertRouting(
            placement, self.place.ep_rank, self.w13.device, names_places=ids_name_places
        )
        check_sharding(sharding, collective, tp_size=self.place.tp_size, tp_rank=self.place.tp_rank)
        self.collective = collective
        self.w13_slots, self.w2_slots = self._slots(num_slots, rank)
        self._parts = {
            name: tuple(
                index * num_experts + e
                for index in members
                for e in (range(num_experts) if expert is None else (expert,))
            )
            for name, (expert, members) in self.packing.homes().items()
        }

    @property
    def num_slots(self) -> int:
        return self.w13_slots.num_slots

    @property
    def parts(self) -> dict[str, tuple[int, ...]]:
        """The modules that an adapter may have factors for: each projection of each expert, and
        each projection of all experts; with the indices of what each covers. The layer itself is
        "experts"."""
        return self._parts

    def forward(
        self,
        x: Tensor,
        topk_ids: Tensor,
        topk_weights: Tensor,
        batch: BatchMetadata,
        pairs: PairMetadata,
        scratch: MoEScratch,
        *,
        quantised_x: Quantised | None = None,
        shared: Callable[[Tensor], Tensor] | None = None,
        form: MoEForm | None = None,
    ) -> Tensor:
        """x [.., hidden] -> [.., hidden], this rank's part of the sum over all ranks.

        topk_ids int32, topk_weights fp32, both [rows, top_k] and contiguous; ids are those of the
        whole model. Of replicas the layer takes one by the number of the row, so that all ranks
        must be given the same rows; with `ids_name_places` the server has chosen, and ids are
        places.
        `batch` is prepared for the step, `pairs` is prepared here and may be shared by layers
        that run one after the other; made `with_base`, for as many experts as the rank holds.
        quantised_x: x for the base weights, where these are quantised; the adapters are always
        applied to x itself.
        shared: the shared experts, x -> [.., hidden] in its dtype, which are added to the result.
            They may run beside the routed experts: they must not write x, and need buffers of their
            own: a DenseWorkspace with a branch more. A traced graph has them in front.
        form: on how many streams; None lets the plan choose.
        The result has no gradient. Raises ValueError.
        """
        hidden = self.packing.hidden
        self._check(x, topk_weights, quantised_x)
        rows = x.reshape(-1, hidden).contiguous()
        if quantised_x is not None:
            quantised_x = like_rows(quantised_x, rows)
        lora = ExpertLoRA(self.w13_slots, self.w2_slots, scratch.workspace, self._group)
        form = self._form(form)
        # before the pairs are changed
        check_pairs(pairs, lora)
        out = torch.empty_like(rows)

        def routed() -> Tensor:
            ids, expert_map = self.routing.ids_and_map(topk_ids)
            pairs.prepare(ids, batch, expert_map=expert_map)
            run_experts(
                rows,
                weight_of(self.w13, self.w13_scales),
                weight_of(self.w2, self.w2_scales),
                topk_weights,
                pairs,
                scratch.buffers,
                out,
                w13_bias=self.w13_bias,
                w2_bias=self.w2_bias,
                lora=lora,
                activation=self.activation,
                router_weight=self.router_weight,
                quantised_x=quantised_x,
                form=form,
            )
            return out

        if shared is None:
            return routed().view(x.shape)
        return add_shared(routed, shared, x, form, num_pairs=topk_weights.numel())

    def _check(self, x: Tensor, topk_weights: Tensor, quantised_x: Quantised | None) -> None:
        hidden = self.packing.hidden
        if x.shape[-1] != hidden:
            raise ValueError(f"x must have {hidden} columns (got {x.shape[-1]})")
        if x.dtype != self.dtype:
            raise ValueError(f"x must be {self.dtype} as it is before quantising (got {x.dtype})")
        if topk_weights.dtype != torch.float32:
            raise ValueError(f"topk_weights must be torch.float32 (got {topk_weights.dtype})")
        if quantised_x is None and self.w13_scales is not None:
            raise ValueError("quantised_x must be given with weights that are quantised")
        if quantised_x is not None and self.w13_scales is None:
            raise ValueError("quantised_x must be None with weights that are not quantised")

    def load_adapter(self, slot: int, parts: ExpertParts) -> None:
        """Put an adapter into a slot, all or nothing. `parts` maps names of `parts` to whole
        factors; a projection that it does not name gets none. ValueError."""
        self.commit(slot, self.stage(parts))

    def unload(self, slot: int) -> None:
        """Empty a slot; its rows then get no delta. ValueError."""
        self.w13_slots.reset(slot)
        self.w2_slots.reset(slot)

    def stage(self, parts: ExpertParts) -> Staged:
        """This rank's part of an adapter, checked, as `commit` takes it. ValueError."""
        return stage_experts(
            self.packing,
            self.cut,
            parts,
            max_rank=self.w13_slots.rank,
            like=self.w13_slots.a,
            down_columns=self._down_columns,
            shared_outer=self.shared_outer,
        )

    def commit(self, slot: int, staged: Staged) -> None:
        """Empty a slot and load a staged adapter into it. ValueError."""
        self.w13_slots.load(slot, staged[: self._num_up])
        self.w2_slots.load(slot, staged[self._num_up :])

    @property
    def _num_up(self) -> int:
        return len(self.packing.projections) - 1

    def _slots(self, num_slots: int, rank: int) -> tuple[ExpertWeights, ExpertWeights]:
        """Of w13 and of w2."""
        local, hidden = self.cut.intermediate.size, self.packing.hidden
        up: dict[str, Any] = {"slice_widths": [local] * self._num_up, "in_features": hidden}
        down: dict[str, Any] = {"slice_widths": [hidden], "in_features": local}
        up["shared_a"] = down["shared_b"] = self.shared_outer
        common: dict[str, Any] = {
            "num_slots": num_slots,
            "num_experts": self.cut.experts.size,
            "dtype": self.dtype,
            "device": self.w13.device,
        }
        self._group, self._down_columns = -1, whole(hidden)
        if self.collective is None:
            sizes = common | {"rank": rank}
            return ExpertWeights(**up, **sizes), ExpertWeights(**down, **sizes)
        self._group = number_of(self.collective)
        part = cut_expert_ranks(rank, hidden, self.place)
        self._down_columns = part.columns
        up |= {"base_widths": up["slice_widths"], "held": part.held, "first_column": 0}
        down |= {"base_widths": [hidden], "held": range(part.rank)}
        down |= {"slice_widths": [part.columns.size], "first_column": part.columns.start}
        sizes = common | {"rank": part.rank}
        return RankShardedExperts(**up, **sizes), RankShardedExperts(**down, **sizes)

    def _form(self, form: MoEForm | None) -> MoEForm | None:
        if form is not None:
            check_choice("form", form, MoEForm)
        return form if self.collective is None else sharded_form(form)


def _parameter(values: Tensor) -> nn.Parameter:
    return nn.Parameter(values, requires_grad=False)
