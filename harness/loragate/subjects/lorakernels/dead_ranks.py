"""What the slot buffers of lorakernels hold in the ranks that an adapter does not use."""

from __future__ import annotations

from loragate.protocol import Pool
from lorakernels.common.sizes import rank_vector
from lorakernels.dense.weights import SlotWeights
from lorakernels.moe.weights import ExpertWeights

# finite, and far from zero in each dtype
_LEFT_OVER = 3.0


def spoil_dead_ranks(weights: SlotWeights | ExpertWeights, slot: int, pool: Pool) -> None:
    """Where dead ranks are NaN in the pool, make those of the buffers what they may hold at worst:
    NaN, and in the vector of B that has the last live rank a number. Zeros are not copied: the
    reset of the slot has to write them."""
    if all(rank == weights.rank for rank in pool.ranks[slot]):
        return
    # of no live rank, and stays on the device: a sync for each slot would take most of the time of
    # a small case
    poisoned = pool.a[slot].isnan().any()
    start, vector = 0, rank_vector(weights.rank)
    for part, width in enumerate(weights.slice_widths):
        rank = pool.ranks[slot][part]
        columns = weights.b[slot, ..., start : start + width, :]
        start += width
        if rank == weights.rank:
            continue
        weights.a[slot, ..., part, rank:, :].masked_fill_(poisoned, float("nan"))
        # B is read in vectors of ranks: nothing is read after the last live vector
        behind = -(-rank // vector) * vector
        columns[..., rank:behind].masked_fill_(poisoned, _LEFT_OVER)
        columns[..., behind:].masked_fill_(poisoned, float("nan"))
