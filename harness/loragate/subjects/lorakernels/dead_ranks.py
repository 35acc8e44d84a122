"""What the slot buffers of lorakernels hold where an adapter has no rank."""

from __future__ import annotations

from loragate.protocol import Pool
from lorakernels.common.sizes import rank_vector
from lorakernels.dense.weights import SlotWeights
from lorakernels.moe.weights import ExpertWeights


def keep_dead_nan(weights: SlotWeights | ExpertWeights, slot: int, pool: Pool) -> None:
    """Dead ranks of the buffers become NaN where they are in the pool. Zeros are left to the
    reset of the slot, which is not to be helped."""
    start, vector = 0, rank_vector(weights.rank)
    for part, width in enumerate(weights.slice_widths):
        rank = pool.ranks[slot][part]
        # asked and answered on the device: waiting for each slice would be most of a small case
        poisoned = pool.a[slot, ..., part, rank:, :].isnan().any()
        weights.a[slot, ..., part, rank:, :].masked_fill_(poisoned, float("nan"))
        # B is read in vectors of ranks: behind the last live one nothing is
        behind = -(-rank // vector) * vector
        columns = weights.b[slot, ..., start : start + width, behind:]
        columns.masked_fill_(poisoned, float("nan"))
        start += width
