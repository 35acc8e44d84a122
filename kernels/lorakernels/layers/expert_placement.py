"""Which experts of a model the ranks of expert parallelism hold. Pure; no torch.

Experts may lie in runs, in turn, or as a load balancer puts them, which may hold one expert in
several places. Of the replicas of an expert exactly one computes a token-expert pair.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True, slots=True)
class ExpertPlacement:
    """`of_rank[r]` are the ids, in the model, of the experts that rank r holds, in the order of its
    local ids. A *place* is a rank and a local id; places are numbered rank by rank. Each expert has
    a place, several of them if it has replicas. Raises ValueError."""

    num_experts: int
    of_rank: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        for rank, experts in enumerate(self.of_rank):
            if not experts:
                raise ValueError(f"rank {rank} must hold at least one expert (got none)")
        unknown = [e for e in self.places if not 0 <= e < self.num_experts]
        if unknown:
            raise ValueError(
                f"experts of ranks must be 0 to {self.num_experts - 1} (got {unknown[0]})"
            )
        missing = sorted(set(range(self.num_experts)) - set(self.places))
        if missing:
            raise ValueError(
                f"each of the {self.num_experts} experts must be on a rank (missing {missing[0]})"
            )

    @classmethod
    def in_runs(cls, num_experts: int, ep_size: int) -> ExpertPlacement:
        """Consecutive experts on each rank. Where they cannot be divided evenly, the first ranks
        hold one more each."""
        _check_sizes(num_experts, ep_size)
        share, rest = divmod(num_experts, ep_size)
        starts = [rank * share + min(rank, rest) for rank in range(ep_size + 1)]
        return cls(
            num_experts,
            tuple(tuple(range(*ends)) for ends in pairwise(starts)),
        )

    @classmethod
    def round_robin(cls, num_experts: int, ep_size: int) -> ExpertPlacement:
        """Expert e on rank e % ep_size."""
        _check_sizes(num_experts, ep_size)
        ranks = range(ep_size)
        return cls(num_experts, tuple(tuple(range(r, num_experts, ep_size)) for r in ranks))

    @classmethod
    def of_places(
        cls, experts: Sequence[int], ep_size: int, *, num_experts: int
    ) -> ExpertPlacement:
        """From the expert of each place, of which all ranks have equally many: what EPLB calls the
        map from physical to logical experts, also as the tensor of a layer that EPLB has."""
        if ep_size < 1 or len(experts) % ep_size:
            raise ValueError(f"ep_size must divide {len(experts)} places (got {ep_size})")
        share = len(experts) // ep_size
        parts = (experts[rank * share : (rank + 1) * share] for rank in range(ep_size))
        # elements of a tensor are equal to no number in a set
        return cls(num_experts, tuple(tuple(map(int, part)) for part in parts))

    @property
    def places(self) -> tuple[int, ...]:
        """The expert of each place."""
        return tuple(expert for experts in self.of_rank for expert in experts)

    @property
    def has_replicas(self) -> bool:
        return len(self.places) > self.num_experts

    def place_map(self, rank: int) -> list[int]:
        """The local id of each place, -1 for those of other ranks."""
        return [
            local if other == rank else -1
            for other, experts in enumerate(self.of_rank)
            for local in range(len(experts))
        ]

    def replicas(self, rank: int) -> list[list[int]]:
        """For each expert, its replicas in the order of their places: the local ids of those on
        this rank, -1 for those of other ranks."""
        found: list[list[int]] = [[] for _ in range(self.num_experts)]
        for expert, local in zip(self.places, self.place_map(rank), strict=True):
            found[expert].append(local)
        return found


def _check_sizes(num_experts: int, ep_size: int) -> None:
    if ep_size < 1:
        raise ValueError(f"ep_size must be at least 1 (got {ep_size})")
    if num_experts < ep_size:
        raise ValueError(f"experts must be at least ep_size {ep_size} (got {num_experts})")
