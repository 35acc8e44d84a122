"""Launches of the alignment of a batch whose buckets are more than a program can count, or take
too much memory to count. Nothing is allocated and nothing waits for the host, so that it can be
captured into a CUDA graph."""

from __future__ import annotations

from torch import Tensor

from lorakernels.moe.align.kernels.arguments import Layout, Routes
from lorakernels.moe.align.kernels.count import sum_counts_kernel
from lorakernels.moe.align.kernels.sort import (
    count_digits_kernel,
    count_tiles_kernel,
    key_pairs_kernel,
    move_digits_kernel,
    write_tiles_kernel,
)
from lorakernels.moe.align.tables import PairTables
from lorakernels.moe.tiles import FEWEST_BINS, digit_bins, sort_spans, sort_stride
from lorakernels.runtime.device import launch_options
from lorakernels.runtime.launching import start


def launch_sorting(
    pairs: PairTables, routes: Routes, *, num_ids: int, is_mapped: bool, pdl: bool
) -> None:
    """Fill every table of `pairs`. `num_ids` is the length of the expert map, if `is_mapped`."""
    layout = pairs.layout(is_mapped=is_mapped)
    keys, order, other_keys, other_order, counts = _parts_of_scratch(pairs)
    _key(pairs, routes, keys, order, num_ids=num_ids, layout=layout, pdl=pdl)
    slot_bins, expert_bins = digit_bins(pairs.num_experts, layout.SLOT_BINS)
    first, second = (keys, order), (other_keys, other_order)
    _sort(pairs, first, second, counts, divisor=1, bins=slot_bins, pdl=pdl)
    _sort(pairs, second, first, counts, divisor=layout.SLOT_BINS, bins=expert_bins, pdl=pdl)
    # the second pair of buffers is free again
    _tile(pairs, first, second, counts, layout=layout, pdl=pdl)


def _parts_of_scratch(pairs: PairTables) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Two buffers of keys and of the pairs in their order, and counts."""
    stride = sort_stride(pairs.num_pairs)
    keys, order, other_keys, other_order = (
        pairs.scratch[start * stride : (start + 1) * stride] for start in range(4)
    )
    return keys, order, other_keys, other_order, pairs.scratch[4 * stride :]


def _key(
    pairs: PairTables,
    routes: Routes,
    keys: Tensor,
    order: Tensor,
    *,
    num_ids: int,
    layout: Layout,
    pdl: bool,
) -> None:
    tables, span = pairs.tables, pairs.tuning.align.span
    programs = max(sort_spans(pairs.num_pairs, span), pairs.reset_programs)
    start(key_pairs_kernel, (programs,))(
        routes,
        tables,
        keys,
        order,
        *pairs.step_sizes(num_ids),
        *tables.resettable,
        layout,
        SPAN=span,
        PDL=pdl,
        num_warps=4,
        **launch_options(pdl),
    )


def _sort(
    pairs: PairTables,
    source: tuple[Tensor, Tensor],
    target: tuple[Tensor, Tensor],
    counts: Tensor,
    *,
    divisor: int,
    bins: int,
    pdl: bool,
) -> None:
    """A stable pass over one digit of the keys."""
    span, options = pairs.tuning.align.span, launch_options(pdl)
    spans = sort_spans(pairs.num_pairs, span)
    digit = {"DIVISOR": divisor, "BINS": bins, "SPAN": span, "PDL": pdl}
    start(count_digits_kernel, (spans,))(
        source[0], counts, pairs.num_pairs, **digit, num_warps=4, **options
    )
    start(sum_counts_kernel, (bins // FEWEST_BINS,))(
        counts, spans, NUM_BINS=bins, BINS=FEWEST_BINS, PDL=pdl, **options
    )
    start(move_digits_kernel, (spans,))(
        *source,
        *target,
        counts,
        pairs.num_pairs,
        spans,
        **digit,
        CHUNK=min(64, span),
        num_warps=4,
        **options,
    )


def _tile(
    pairs: PairTables,
    sorted_pairs: tuple[Tensor, Tensor],
    ranks: tuple[Tensor, Tensor],
    counts: Tensor,
    *,
    layout: Layout,
    pdl: bool,
) -> None:
    """Cut the sorted pairs into tiles; `ranks` are buffers of as many values."""
    span, options = pairs.tuning.align.span, launch_options(pdl)
    spans, (keys, order) = sort_spans(pairs.num_pairs, span), sorted_pairs
    heights = {"HEIGHT": pairs.height, "BASE_HEIGHT": pairs.base_height, "SPAN": span, "PDL": pdl}
    start(count_tiles_kernel, (spans,))(
        keys,
        *ranks,
        counts,
        pairs.num_pairs,
        pairs.num_experts,
        pairs.num_pairs.bit_length(),
        layout,
        **heights,
        num_warps=4,
        **options,
    )
    start(sum_counts_kernel, (1,))(counts, spans, NUM_BINS=2, BINS=2, PDL=pdl, **options)
    start(write_tiles_kernel, (spans,))(
        pairs.tables,
        keys,
        order,
        *ranks,
        counts,
        pairs.num_pairs,
        pairs.num_experts,
        spans,
        layout,
        **heights,
        num_warps=4,
        **options,
    )
