"""Launches of the alignment of a batch whose pairs are counted: arguments and grids."""

from __future__ import annotations

from lorakernels.moe.align.kernels.arguments import Layout, Routes
from lorakernels.moe.align.kernels.count import (
    count_pairs_kernel,
    find_offsets_kernel,
    sum_counts_kernel,
)
from lorakernels.moe.align.kernels.place import place_pairs_kernel
from lorakernels.moe.align.tables import PairTables
from lorakernels.moe.tiles import FEWEST_BINS
from lorakernels.runtime.device import launch_options
from lorakernels.runtime.launching import start


def launch_counting(
    pairs: PairTables, routes: Routes, *, num_ids: int, is_mapped: bool, pdl: bool
) -> None:
    """Fill every table of `pairs`. `num_ids` is the length of the expert map, if `is_mapped`."""
    span, tables = pairs.tuning.align.span, pairs.tables
    spans = -(-pairs.num_pairs // span)
    layout = pairs.layout(is_mapped=is_mapped)
    _count(pairs, routes, spans, num_ids=num_ids, layout=layout, pdl=pdl)
    start(place_pairs_kernel, (max(spans, pairs.reset_programs),))(
        routes,
        tables,
        pairs.scratch,
        *pairs.step_sizes(num_ids),
        spans,
        tables.pair_slots.numel(),
        tables.tile_slots.numel(),
        tables.base_experts.numel(),
        layout,
        NUM_BINS=pairs.num_bins,
        HEIGHT=pairs.height,
        BASE_HEIGHT=pairs.base_height,
        SPAN=span,
        CHUNK=min(64, span),
        PDL=pdl,
        num_warps=4,
        **launch_options(pdl),
    )


def _count(
    pairs: PairTables, routes: Routes, spans: int, *, num_ids: int, layout: Layout, pdl: bool
) -> None:
    """The buckets of each span, then those of all spans before it, then the offsets."""
    options, tables = launch_options(pdl), pairs.tables
    start(count_pairs_kernel, (spans,))(
        routes,
        pairs.scratch,
        tables.tile_pairs,
        tables.base_pairs,
        *pairs.step_sizes(num_ids),
        tables.tile_pairs.shape[0],
        tables.base_pairs.shape[0],
        layout,
        NUM_BINS=pairs.num_bins,
        SPAN=pairs.tuning.align.span,
        PDL=pdl,
        num_warps=4,
        **options,
    )
    start(sum_counts_kernel, (pairs.num_bins // FEWEST_BINS,))(
        pairs.scratch, spans, NUM_BINS=pairs.num_bins, BINS=FEWEST_BINS, PDL=pdl, **options
    )
    start(find_offsets_kernel, (1,))(
        pairs.scratch,
        tables.num_tiles,
        tables.num_base_tiles,
        spans,
        layout,
        NUM_BINS=pairs.num_bins,
        HEIGHT=pairs.height,
        BASE_HEIGHT=pairs.base_height,
        PDL=pdl,
        num_warps=8,
        **options,
    )
