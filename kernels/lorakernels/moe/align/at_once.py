"""The launch of the alignment of a small batch, of which one program sorts all pairs."""

from __future__ import annotations

from lorakernels.moe.align.kernels.arguments import Routes
from lorakernels.moe.align.kernels.sort_at_once import sort_at_once_kernel
from lorakernels.moe.align.tables import PairTables
from lorakernels.moe.tiles import block_of_pairs
from lorakernels.runtime.device import launch_options
from lorakernels.runtime.launching import start


def launch_sort_at_once(
    pairs: PairTables, routes: Routes, *, num_ids: int, is_mapped: bool, pdl: bool
) -> None:
    """Fill every table of `pairs`. `num_ids` is the length of the expert map, if `is_mapped`."""
    tables, block = pairs.tables, block_of_pairs(pairs.num_pairs)
    start(sort_at_once_kernel, (1 + pairs.reset_programs,))(
        routes,
        tables,
        *pairs.step_sizes(num_ids),
        *tables.resettable,
        pairs.layout(is_mapped=is_mapped),
        HEIGHT=pairs.height,
        BASE_HEIGHT=pairs.base_height,
        PAIRS=block,
        PDL=pdl,
        num_warps=4 if block <= 128 else 8,
        **launch_options(pdl),
    )
