"""How the experts of a MoE layer are cut over expert- and tensor-parallel ranks. Pure; no torch.

Expert parallelism cuts the axis of experts, tensor parallelism the intermediate size: the
outputs of gate and up, each on its own, and the inputs of down. The rank of an adapter is
cut on request only, and then by the rank of the buffers (vllm #31994).

Invariant: over all (ep, tp) ranks of a group the live ranges cover each element of each tensor
of the unpadded model exactly once, or once for each place of its expert.
"""

from __future__ import annotations

from dataclasses import dataclass

from lorakernels.layers.expert_placement import ExpertPlacement
from lorakernels.layers.partition import Shard, cut_dimension


@dataclass(frozen=True, slots=True)
class MoERank:
    """A rank's place in its group. Experts are cut into `ep_size` parts, and each part over
    `tp_size` ranks."""

    ep_size: int = 1
    ep_rank: int = 0
    tp_size: int = 1
    tp_rank: int = 0

    def __post_init__(self) -> None:
        for axis, size, rank in (
            ("ep", self.ep_size, self.ep_rank),
            ("tp", self.tp_size, self.tp_rank),
        ):
            if size < 1:
                raise ValueError(f"{axis}_size must be at least 1 (got {size})")
            if not 0 <= rank < size:
                raise ValueError(f"{axis}_rank must be 0 to {size - 1} (got {rank})")

    @classmethod
    def of_group(cls, rank: int, *, ep_size: int, tp_size: int) -> MoERank:
        """The place of rank 0 to ep_size * tp_size - 1 of a group; ranks that hold the same
        experts are adjacent. The rank in the group is neither of the two (sglang #24171)."""
        if ep_size < 1 or tp_size < 1:
            raise ValueError(
                f"ep_size and tp_size must be at least 1 (got {ep_size} and {tp_size})"
            )
        if not 0 <= rank < ep_size * tp_size:
            raise ValueError(f"rank must be 0 to {ep_size * tp_size - 1} (got {rank})")
        return cls(ep_size, rank // tp_size, tp_size, rank % tp_size)


@dataclass(frozen=True, slots=True)
class HeldExperts:
    """The experts of a rank: their ids in the model, in the order of its local ids."""

    ids: tuple[int, ...]

    @property
    def size(self) -> int:
        return len(self.ids)

    @property
    def run(self) -> range | None:
        """The ids as a range, if they are one."""
        run = range(self.ids[0], self.ids[0] + len(self.ids))
        return run if self.ids == tuple(run) else None


@dataclass(frozen=True, slots=True)
class MoECut:
    """A rank's part of a layer: its experts, its range of the intermediate size, which are
    the columns of gate and of up and the inputs of down, and whether it adds the bias of down (the
    sum over tensor-parallel ranks must hold it once)."""

    experts: HeldExperts
    intermediate: Shard
    owns_bias: bool


@dataclass(frozen=True, slots=True)
class ExpertRankCut:
    """A rank's part of the adapters of a layer that is sharded by rank: `held` of the ranks of A of
    gate and up, of `rank` in the buffers, and its columns of B of down."""

    held: range
    rank: int
    columns: Shard


def cut_expert_ranks(rank: int, hidden: int, place: MoERank) -> ExpertRankCut:
    """The rank of the buffers is rounded up to a multiple of tp_size and cut evenly, whatever the
    rank of an adapter; the columns of down are as even as they can be. Raises ValueError."""
    if hidden < place.tp_size:
        raise ValueError(
            f"a layer sharded by rank must have {place.tp_size} hidden features or more "
            f"(got {hidden})"
        )
    size = -(-rank // place.tp_size)
    held = range(place.tp_rank * size, (place.tp_rank + 1) * size)
    start, stop = (
        hidden * number // place.tp_size for number in (place.tp_rank, place.tp_rank + 1)
    )
    return ExpertRankCut(held, size * place.tp_size, Shard(start, stop, stop - start))


def cut_moe(
    num_experts: int,
    intermediate: int,
    rank: MoERank,
    *,
    padded_intermediate: int | None = None,
    placement: ExpertPlacement | None = None,
) -> MoECut:
    """`padded_intermediate` is for a base layer whose shards are cut from a padded size; adapters
    are not padded. Without a placement the experts lie in runs. Raises ValueError."""
    placement = placement or ExpertPlacement.in_runs(num_experts, rank.ep_size)
    if (placement.num_experts, len(placement.of_rank)) != (num_experts, rank.ep_size):
        raise ValueError(
            f"placement must be of {num_experts} experts on {rank.ep_size} ranks "
            f"(got {placement.num_experts} on {len(placement.of_rank)})"
        )
    padded = intermediate if padded_intermediate is None else padded_intermediate
    return MoECut(
        HeldExperts(placement.of_rank[rank.ep_rank]),
        cut_dimension("intermediate size", intermediate, rank.tp_size, rank.tp_rank, padded),
        owns_bias=rank.tp_rank == 0,
    )
