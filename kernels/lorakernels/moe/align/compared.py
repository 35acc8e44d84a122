"""Launches of the alignment of a batch whose pairs are compared with each other. Nothing is
allocated and nothing waits for the host, so that it can be captured into a CUDA graph."""

from __future__ import annotations

from lorakernels.moe.align.kernels.arguments import Routes
from lorakernels.moe.align.kernels.compare import compare_pairs_kernel, cut_pairs_kernel
from lorakernels.moe.align.tables import PairTables
from lorakernels.moe.tiles import block_of_pairs
from lorakernels.runtime.device import launch_options
from lorakernels.runtime.launching import start


def launch_comparing(
    pairs: PairTables, routes: Routes, *, num_ids: int, is_mapped: bool, pdl: bool
) -> None:
    """Fill every table of `pairs`. `num_ids` is the length of the expert map, if `is_mapped`."""
    tables, layout, options = pairs.tables, pairs.layout(is_mapped=is_mapped), launch_options(pdl)
    block, span = block_of_pairs(pairs.num_pairs), pairs.tuning.align.compared_span
    programs = -(-pairs.num_pairs // span)
    start(compare_pairs_kernel, (programs,))(
        routes,
        tables,
        pairs.scratch,
        *pairs.step_sizes(num_ids),
        *tables.resettable,
        layout,
        PAIRS=block,
        SPAN=span,
        PDL=pdl,
        num_warps=4,
        **options,
    )
    start(cut_pairs_kernel, (1,))(
        tables,
        pairs.scratch,
        pairs.num_pairs,
        pairs.num_experts,
        layout,
        HEIGHT=pairs.height,
        BASE_HEIGHT=pairs.base_height,
        PAIRS=block,
        PDL=pdl,
        num_warps=8,
        **options,
    )
