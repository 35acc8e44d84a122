"""Which experts of moe_layer each rank of expert parallelism holds, and which of them computes a
token-expert pair."""

from __future__ import annotations

import torch
from torch import Tensor

from loragate.matrix.case import Case, Placement


def experts_of_ranks(case: Case) -> list[list[int]]:
    """For each of `case.ep` ranks the experts that it holds, in the order of its own ids.

    REPLICATED: in turn, from the last expert on. Each rank has the first expert of the next rank as
    well, ahead of its own, and the last rank has the last expert of the model once more.
    """
    count, ranks = case.experts, range(case.ep)
    if case.placement is Placement.RUNS:
        share, rest = divmod(count, case.ep)
        starts = [rank * share + min(rank, rest) for rank in range(case.ep + 1)]
        return [list(range(starts[rank], starts[rank + 1])) for rank in ranks]
    if case.placement is Placement.ROUND_ROBIN:
        return [list(range(rank, count, case.ep)) for rank in ranks]
    own = [list(range(count - 1 - rank, -1, -case.ep)) for rank in ranks]
    held = [[own[(rank + 1) % case.ep][0], *own[rank]] for rank in ranks]
    held[-1].append(count - 1)
    return held


def rank_of_pairs(case: Case, experts: Tensor, rows: Tensor) -> Tensor:
    """int64 like `experts`, the rank that computes each pair of the expert and the row: of the
    places of an expert, in the order of ranks, row t takes number t % count."""
    found: list[list[int]] = [[] for _ in range(case.experts)]
    for rank, held in enumerate(experts_of_ranks(case)):
        for expert in held:
            found[expert].append(rank)
    most = max(map(len, found))
    table = torch.tensor([ranks + [-1] * (most - len(ranks)) for ranks in found])
    counts = torch.tensor([len(ranks) for ranks in found])
    table, counts = table.to(experts.device), counts.to(experts.device)
    return table[experts, rows % counts[experts]]
