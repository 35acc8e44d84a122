"""NaN in the ranks of the slot buffers of lorakernels that an adapter does not use."""

from __future__ import annotations

from loragate.protocol import Pool
from lorakernels.common.sizes import rank_vector
from lorakernels.dense.weights import SlotWeights
from lorakernels.moe.weights import ExpertWeights


def keep_dead_nan(weights: SlotWeights | ExpertWeights, slot: int, pool: Pool) -> None:
    """Make dead ranks of the buffers NaN where they are NaN in the pool. Zeros are not copied: the
    reset of the slot has to write them."""
    start, vector = 0, rank_vector(weights.rank)
    for part, width in enumerate(weights.slice_widths):
        rank = pool.ranks[slot][part]
        # stays on the device: a sync for each slice would take most of the time of a small case
        poisoned = pool.a[slot, ..., part, rank:, :].isnan().any()
        weights.a[slot, ..., part, rank:, :].masked_fill_(poisoned, float("nan"))
        # B is read in vectors of ranks: nothing is read after the last live vector
        behind = -(-rank // vector) * vector
        columns = weights.b[slot, ..., start : start + width, behind:]
        columns.masked_fill_(poisoned, float("nan"))
        start += width
