"""From the experts that a router chose to the local ids of a rank, on the device, without a wait.

Row t of a step takes replica t % count of an expert with so many, counted in the order of places.
Every rank decides that by itself, so all ranks must see the same rows in the same order.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lorakernels.layers.expert_placement import ExpertPlacement
from lorakernels.runtime.device import keep_address


class ExpertRouting:
    """The tables of a rank. `expert_map` int32 is the local id of each expert, or with
    `names_places` of each place, for a server that chooses replicas itself; -1 for those of other
    ranks. `replicas` stands in its place where the layer chooses."""

    def __init__(
        self,
        placement: ExpertPlacement,
        rank: int,
        device: torch.device,
        *,
        names_places: bool,
    ) -> None:
        places = tuple(range(len(placement.places)))
        # the ids of a single rank may be local already
        self._is_local = len(placement.of_rank) == 1 and placement.places == places
        chooses = placement.has_replicas and not names_places
        self.replicas = ReplicaMap(placement, rank, device) if chooses else None
        local = placement.place_map(rank)
        if not placement.has_replicas and not names_places:
            local = [replica for (replica,) in placement.replicas(rank)]
        self.expert_map = keep_address(torch.tensor(local, dtype=torch.int32, device=device))

    def ids_and_map(self, topk_ids: Tensor) -> tuple[Tensor, Tensor | None]:
        """The ids of a step and the map to apply to them, as PairMetadata.prepare takes them. It
        refuses others, which are returned as they are."""
        is_looked_up = topk_ids.dim() == 2 and topk_ids.dtype == torch.int32
        if self.replicas is not None and is_looked_up and topk_ids.device == self.expert_map.device:
            return self.replicas.choose(topk_ids), None
        return topk_ids, None if self._is_local else self.expert_map


class ReplicaMap:
    """A rank's local ids of the replicas of each expert: `local_ids` int32 [experts, most
    replicas], -1 for those of other ranks, and `counts` int32 [experts]."""

    def __init__(self, placement: ExpertPlacement, rank: int, device: torch.device) -> None:
        replicas = placement.replicas(rank)
        most = max(map(len, replicas))
        rows = [row + [-1] * (most - len(row)) for row in replicas]
        self.local_ids = keep_address(torch.tensor(rows, dtype=torch.int32, device=device))
        counts = [len(row) for row in replicas]
        self.counts = keep_address(torch.tensor(counts, dtype=torch.int32, device=device))

    def choose(self, topk_ids: Tensor) -> Tensor:
        """[rows, top_k] in the dtype of the ids: the local id of the replica of each pair, -1 where
        another rank has it or there is no such expert."""
        last = len(self.counts) - 1
        known = (topk_ids >= 0) & (topk_ids <= last)
        experts = topk_ids.clamp(0, last)
        rows = torch.arange(topk_ids.shape[0], dtype=torch.int32, device=topk_ids.device)
        local = self.local_ids[experts, rows[:, None] % self.counts[experts]]
        return torch.where(known, local, -1).to(topk_ids.dtype)
