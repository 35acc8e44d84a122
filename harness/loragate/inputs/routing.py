"""Which experts the tokens of a step choose.

In every step with a row of the last adapter, that adapter meets the last local expert: this pair
is the first to be lost where a grid or a buffer is one too small (vllm #32277, #40131). With
several ranks the same token chooses an expert of another rank, and -1, as far as it has choices for
both.
"""

from __future__ import annotations

import torch
from torch import Tensor

from loragate.core.machine import Machine
from loragate.inputs.draw import DataKind, Draw
from loragate.inputs.exact_layer import exact_layer_weights
from loragate.inputs.exactness import exact_router_weights
from loragate.inputs.expert_places import experts_of_ranks
from loragate.inputs.placement import place, place_integers
from loragate.matrix.case import (
    MOE_SITES,
    Case,
    ExpertMap,
    Ids,
    Layout,
    RouterWeights,
    Routing,
    Site,
)
from loragate.protocol import Routes

# share of the tokens that choose the hot expert, and of the pairs that have no expert at all
_HOT, _NOWHERE = 0.9, 0.1
# share of the choices that are repeated or unknown, where a case asks for them
_ODD = 0.4
_INT32 = torch.iinfo(torch.int32)


def make_routes(
    case: Case, seed: int, step: int, kind: DataKind, machine: Machine, token_slots: Tensor
) -> Routes | None:
    """The routes of step number `step`; None for a site without experts. Ids and weights lie
    inside guard bands; the expert map is the same in every step."""
    if case.site not in MOE_SITES:
        return None
    local = _local_experts(case, seed, machine)
    draw = Draw(machine, seed, "routes", step)
    near = _experts_near_the_last(case, local)
    ids = _choices(case, draw, local, near, token_slots)
    if case.expert_map is ExpertMap.PARALLEL or case.ep > 1:
        nowhere = draw.uniform(0, 1, *ids.shape) < _NOWHERE
        for row in _last_slot_row(case, token_slots):
            nowhere[row] = _nowhere_of_last_slot(ids[row], near, draw, nowhere[row])
        # never the pair that every step must have
        ids[nowhere & (ids != local[-1])] = -1
    weights = None
    if case.router is not RouterWeights.NONE:
        draw = Draw(machine, seed, f"router-{kind}", step)
        shape = (case.tokens, case.top_k)
        exact = kind is DataKind.EXACT
        drawn = _exact_weights(case, draw) if exact else draw.uniform(0.3, 0.9, *shape)
        weights = place(drawn, Layout.CONTIGUOUS)
    ids = _odd_ids(case, seed, step, machine, ids, kept=_last_slot_row(case, token_slots))
    return Routes(
        # an id that is read past the end is the last expert: the damage is written and seen
        place_integers(ids.int(), _last_local(case, local)),
        _expert_map(case, local),
        weights,
        case.global_experts if case.ids is Ids.UNKNOWN else None,
    )


def _nowhere_of_last_slot(ids: Tensor, near: Tensor, draw: Draw, nowhere: Tensor) -> Tensor:
    """Which of these choices have no expert: not the first that is on another rank, but another
    one. Where that is all there is besides the last local expert, it has none in half of all
    draws."""
    last, result = near[-1], nowhere.clone()
    others = (ids != last).nonzero().flatten()
    far = others[~torch.isin(ids[others], near)][:1]
    rest = others[~torch.isin(others, far)]
    result[rest[:1]] = True
    result[far] = draw.uniform(0, 1, 1) < 0.5 if len(rest) == 0 else False
    return result


def _odd_ids(
    case: Case, seed: int, step: int, machine: Machine, ids: Tensor, *, kept: list[int]
) -> Tensor:
    """`ids` with those that `case.ids` asks for, but not in the rows `kept`."""
    draw = Draw(machine, seed, "odd-ids", step)
    chosen = draw.uniform(0, 1, *ids.shape) < _ODD
    chosen[kept] = False
    if case.ids is Ids.REPEATED:
        return torch.where(chosen, ids.roll(1, dims=1), ids)
    if case.ids is Ids.UNKNOWN:
        count = case.global_experts
        odd = [count, count + 1, _INT32.max, -1, -2, _INT32.min]
        unknown = torch.tensor(odd, device=ids.device)
        drawn = unknown[draw.integers(0, len(unknown), *ids.shape)]
        return torch.where(chosen, drawn, ids)
    return ids


def _exact_weights(case: Case, draw: Draw) -> Tensor:
    if case.site is Site.MOE_LAYER:
        return exact_layer_weights(draw, case)
    return exact_router_weights(draw, case.tokens, case.top_k)


def _local_experts(case: Case, seed: int, machine: Machine) -> Tensor:
    """int64 [experts]: the global id of each local expert."""
    draw = Draw(machine, seed, "experts")
    if case.expert_map is ExpertMap.LOCAL:
        return torch.arange(case.experts, device=draw.device)
    # any placement: in one server ranks hold runs of experts, in another every second one.
    # the last global expert is local: an index of -1 counts from the end and gives a wrong delta
    return _shuffled(draw, case.global_experts, first=case.global_experts - 1)[: case.experts]


def _last_local(case: Case, local: Tensor) -> int:
    """The global id of the last local expert."""
    # a GPU would be waited for
    return case.experts - 1 if case.expert_map is ExpertMap.LOCAL else int(local[-1])


def _experts_near_the_last(case: Case, local: Tensor) -> Tensor:
    """int64: the global ids of the experts on the ranks that hold the last local expert, which is
    the last of them."""
    if case.expert_map is ExpertMap.PARALLEL:
        return local
    last = _last_local(case, local)
    holders = [held for held in experts_of_ranks(case) if last in held]
    others = {expert for held in holders for expert in held} - {last}
    return local[[*sorted(others), last]]


def _expert_map(case: Case, local: Tensor) -> Tensor | None:
    if case.expert_map is ExpertMap.LOCAL:
        return None
    table = torch.full((1, case.global_experts), -1, dtype=torch.int32, device=local.device)
    table[0, local] = torch.arange(case.experts, dtype=torch.int32, device=local.device)
    # the guards of the map are valid local ids, so that a read past its end gives a wrong delta
    return place_integers(table, 0)[0]


def _choices(case: Case, draw: Draw, local: Tensor, near: Tensor, token_slots: Tensor) -> Tensor:
    """int64 [tokens, top_k]: global ids, distinct for each token, in random order.

    Nothing here asks a GPU for a value, which may take as long as all that runs beside it: single
    ids are tensors of one element, because one without dimensions is read when it is an index.
    """
    count, last = case.global_experts, local[-1:]
    scores = draw.uniform(0, 1, case.tokens, count)
    # in order of popularity; the last local expert is always among the popular ones
    ranking = _shuffled(draw, count, first=last)
    used = count - 1 if case.routing is Routing.UNIFORM else -(-count // 2)
    used = max(used, case.top_k)
    scores[:, ranking[used:]] -= 2
    if case.routing is Routing.SKEWED:
        hot = ranking[min(1, count - 1) :][:1]
        scores[:, hot] += (draw.uniform(0, 1, case.tokens, 1) < _HOT).float()
    row = _last_slot_row(case, token_slots)
    is_near = torch.zeros(count, dtype=torch.bool, device=near.device).index_fill(0, near, True)
    is_far = ~is_near[ranking[:used]]
    # the first one, if there is one
    scores[row, ranking[is_far.int().argmax(dim=0, keepdim=True)]] += 2 * is_far.any()
    scores[row, last] += 4
    # topk may break ties either way
    best = torch.argsort(scores, dim=1, descending=True, stable=True)[:, : case.top_k]
    order = torch.argsort(draw.uniform(0, 1, *best.shape), dim=1, stable=True)
    return best.gather(1, order)


def _last_slot_row(case: Case, token_slots: Tensor) -> list[int]:
    """The first token of the last slot, if there is one."""
    return (token_slots == case.slots - 1).nonzero().flatten()[:1].tolist()


def _shuffled(draw: Draw, count: int, *, first: int | Tensor) -> Tensor:
    """int64 [count]: `first`, and behind it the others in random order."""
    scores = draw.uniform(0, 1, count)
    scores[first] = -1
    order: Tensor = torch.argsort(scores, stable=True)
    return order
