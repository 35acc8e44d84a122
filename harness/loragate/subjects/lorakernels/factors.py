"""The adapters of a pool as the linear layers of lorakernels load them."""

from __future__ import annotations

from loragate.protocol import Pool
from lorakernels.dense.weights import LoRAFactors


def factors(pool: Pool, slot: int) -> dict[int, LoRAFactors]:
    """Slice -> live part of an adapter; a slice that the adapter lacks is missing."""
    return {
        part: LoRAFactors(pool.a[slot, part, :rank], b[slot, :, :rank], scale)
        for part, (b, rank, scale) in enumerate(
            zip(pool.b, pool.ranks[slot], pool.scales[slot], strict=True)
        )
        if rank
    }
