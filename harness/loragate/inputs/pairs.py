"""A step row by row: in the mathematics, token-expert pairs are rows like any other."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from loragate.inputs.mapping import BASE_ROW
from loragate.protocol import Batch, Routes


@dataclass(frozen=True, slots=True)
class OutRows:
    """What makes up each row of an output.

    `x_rows` int64 on the device: its row of x. `slots` int32 on the CPU: its adapter, -1 for a
    row without a delta. `experts` int64 on the device: its local expert; 0 without experts, and
    -1 for an expert that is not here. `weights` fp32: the factor of its delta; None: 1.
    """

    x_rows: Tensor
    slots: Tensor
    experts: Tensor
    weights: Tensor | None

    def __getitem__(self, rows: Tensor) -> OutRows:
        weights = None if self.weights is None else self.weights[rows]
        return OutRows(self.x_rows[rows], self.slots[rows.cpu()], self.experts[rows], weights)


def out_rows(batch: Batch) -> OutRows:
    """One entry for each row of `batch.out`, which is a token, or a pair of moe_delta."""
    if batch.routes is None or _is_summed(batch):
        index = torch.arange(batch.x.shape[0], device=batch.x.device)
        return OutRows(index, batch.token_slots, torch.zeros_like(index), None)
    return pair_rows(batch)


def pair_rows(batch: Batch) -> OutRows:
    """One entry for each pair of an MoE site."""
    routes = batch.routes
    assert routes is not None
    top_k = routes.topk_ids.shape[1]
    experts = local_experts(routes).flatten()
    slots = batch.token_slots.repeat_interleave(top_k)
    slots = torch.where(experts.cpu() < 0, BASE_ROW, slots)
    index = torch.arange(len(experts), device=batch.x.device)
    if len(batch.x) == len(batch.token_slots):
        index = index // top_k
    weights = None if routes.weights is None else routes.weights.flatten()
    return OutRows(index, slots, experts, weights)


def local_experts(routes: Routes) -> Tensor:
    """int64 like `topk_ids`: the local id of each choice, -1 for an expert that is not here."""
    ids = routes.topk_ids.long()
    if routes.num_ids is not None:
        ids = torch.where(ids < routes.num_ids, ids, -1)
    if routes.expert_map is not None:
        ids = torch.where(ids < 0, -1, routes.expert_map.long()[ids.clamp(min=0)])
    return ids.clamp(min=-1)


def part_of(batch: Batch, tokens: slice) -> Batch:
    """Some consecutive tokens of a batch, with all their pairs; views of its tensors."""
    routes = batch.routes
    if routes is None:
        return Batch(batch.x[tokens], batch.token_slots[tokens], batch.out[tokens])
    weights = None if routes.weights is None else routes.weights[tokens]
    pairs = pairs_of(tokens, routes)
    per_token = len(batch.x) == len(batch.token_slots)
    return Batch(
        batch.x[tokens if per_token else pairs],
        batch.token_slots[tokens],
        batch.out[out_rows_of(batch, tokens)],
        replace(routes, topk_ids=routes.topk_ids[tokens], weights=weights),
    )


def out_rows_of(batch: Batch, tokens: slice) -> slice:
    """The rows of the output of some consecutive tokens."""
    if batch.routes is None or _is_summed(batch):
        return tokens
    return pairs_of(tokens, batch.routes)


def _is_summed(batch: Batch) -> bool:
    """Whether each row of the output is a token; with one choice a token it is also a pair."""
    assert batch.routes is not None
    return len(batch.out) != batch.routes.topk_ids.numel()


def pairs_of(tokens: slice, routes: Routes) -> slice:
    top_k = routes.topk_ids.shape[1]
    return slice(tokens.start * top_k, tokens.stop * top_k)
