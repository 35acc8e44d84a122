"""Subject `vllm`, site moe_layer: the MoE layer of vLLM with adapters, on one stream and on two.

A server's own function gives it its adapters, and the layer does all that it does in a model but
for the choice of experts, which a case gives: its router is replaced by one that returns them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from loragate.inputs.draw import torch_dtype
from loragate.matrix.case import Case, RouterWeights
from loragate.protocol import BaseExperts, Pool, Routes
from loragate.subjects.vllm.layer_host import LayerHost
from loragate.subjects.vllm.layer_package import VllmLayers
from loragate.subjects.vllm.moe import ALIGNMENT_MAX_EXPERTS, ONE_SHOT_MAX_RANK
from loragate.subjects.vllm.package import fold_scale


def refusal(case: Case) -> str | None:
    """The reason why vLLM 0.26 cannot run a case of moe_layer, or None."""
    reasons = {
        f"rank {case.rank} needs buffers above the limit of {ONE_SHOT_MAX_RANK} that its one-shot "
        "kernel asserts": case.rank > ONE_SHOT_MAX_RANK,
        f"{case.experts} experts are above the limit of {ALIGNMENT_MAX_EXPERTS} of its "
        "alignment": case.experts > ALIGNMENT_MAX_EXPERTS,
        # weighed rows enter the base product alone, and the delta of down is weighed in any case
        "its adapters take x without the router weights of the input, and weigh the output": (
            case.router is RouterWeights.INPUT
        ),
        "its MoE layer takes x of two dimensions": case.input_dims != 2,
    }
    return next((reason for reason, applies in reasons.items() if applies), None)


class GivenRoutes:
    """A router that returns the experts and weights of the step."""

    # the layer asks for these when it is built
    eplb_state = None

    def __init__(self, method: Any) -> None:
        self.routing_method_type = method
        self.routes: Routes | None = None

    def select_experts(self, **_: object) -> tuple[Tensor, Tensor]:
        assert self.routes is not None
        assert self.routes.weights is not None
        return self.routes.weights, self.routes.topk_ids


class VllmMoELayer:
    """One layer, and the server around it."""

    def __init__(self, package: VllmLayers, case: Case, device: str, base: BaseExperts) -> None:
        self._host = LayerHost(package, case, device)
        self._router = GivenRoutes(package.given_routing)
        with self._host.building():
            layer = package.moe_layer(
                num_experts=case.experts,
                top_k=case.top_k,
                hidden_size=case.in_features,
                intermediate_size=case.slices[0],
                params_dtype=torch_dtype(case.dtype),
                prefix="experts",
                router=self._router,
                activation="silu" if len(case.slices) == 2 else "silu_no_mul",
            )
        experts = layer.routed_experts
        experts.w13_weight = nn.Parameter(base.weight, requires_grad=False)
        experts.w2_weight = nn.Parameter(base.down, requires_grad=False)
        with self._host.configured():
            experts.quant_method.process_weights_after_loading(experts)
        self.layer = self._host.with_adapters(layer, ["gate_up", "down"])
        # the layer gets the experts of a step from its router alone
        self._logits = torch.empty(0, device=device)
        self._profile(case, device)

    def load(self, slot: int, pool: Pool) -> None:
        assert pool.down is not None
        factors = [_factors(pool, slot, part) for part in range(len(pool.b))]
        gate, up = factors[0], factors[-1]
        down = _factors(pool.down, slot, 0)
        # of a layer without a gate the third is not read
        a, b = zip(gate, down, up, strict=True)
        self.layer.set_lora(slot, [*a], [*b])

    def unload(self, slot: int) -> None:
        self.layer.reset_lora(slot)

    def prepare(self, token_slots: Tensor) -> None:
        self._host.prepare(token_slots)

    def apply(self, x: Tensor, out: Tensor, routes: Routes) -> Tensor:
        self._router.routes = routes
        with self._host.running():
            result: Tensor = self.layer(x, self._logits)
        return result

    def _profile(self, case: Case, device: str) -> None:
        """The largest step, as a server runs one before it serves: it makes what the layer keeps
        for all later steps, which are its tables of addresses and the memory that layers share.
        Otherwise a first step would do more than a second one, and a larger step would free memory
        which the graph of a smaller one uses."""
        rows = case.max_tokens
        x = torch.zeros(rows, case.in_features, dtype=torch_dtype(case.dtype), device=device)
        ids = torch.arange(case.top_k, dtype=torch.int32, device=device).repeat(rows, 1)
        weights = torch.zeros(rows, case.top_k, device=device)
        # without a row that has an adapter the tables would not be made
        self.prepare(torch.zeros(rows, dtype=torch.int32))
        self.apply(x, torch.empty_like(x), Routes(ids, None, weights))


def _factors(pool: Pool, slot: int, part: int) -> tuple[Tensor, Tensor]:
    """A [experts or 1, live rank, in_features], and B with its scale; no rank of an absent one."""
    rank, scale = pool.ranks[slot][part], pool.scales[slot][part]
    return pool.a[slot, :, part, :rank], fold_scale(pool.b[part][slot, :, :, :rank], scale)
