"""How token-expert pairs are cut into tiles and counted: from shapes and measured constants alone,
so that all of it is constant in a captured graph. Pure.

A pair is one of the top-k choices of a token; a bucket is the pairs of one (expert, slot).
"""

from __future__ import annotations

from enum import Enum, auto

from lorakernels.batch.metadata import MIN_TILE_ROWS
from lorakernels.common.sizes import power_of_2
from lorakernels.runtime.tuning import DEFAULT, Tuning

# fewest counters that an alignment has; a power of two
FEWEST_BINS = 16


def tile_height(num_pairs: int, num_experts: int, tuning: Tuning = DEFAULT) -> int:
    """Pairs of one (expert, slot) that one tile covers."""
    num_pairs = tuning.moe.planned_pairs or num_pairs
    pairs_of_a_bucket = num_pairs / (tuning.moe.usual_slots * num_experts)
    if pairs_of_a_bucket < tuning.moe.full * MIN_TILE_ROWS:
        return MIN_TILE_ROWS
    low = pairs_of_a_bucket < tuning.moe.full * 32
    return 32 if low or num_pairs < tuning.moe.pairs_of_tall_tiles else 64


def base_tile_height(num_pairs: int, num_experts: int, tuning: Tuning = DEFAULT) -> int:
    """Pairs of one expert, whatever their slots, that one tile of the base product covers."""
    num_pairs = tuning.moe.planned_pairs or num_pairs
    # tiles that are mostly full need the fewest passes over an expert's weights
    return min(128, max(MIN_TILE_ROWS, power_of_2(2 * num_pairs // num_experts)))


def max_tiles(num_pairs: int, num_groups: int, height: int) -> int:
    """Most tiles a batch can need: each group of pairs adds at most one that is not full."""
    return num_pairs // height + min(num_groups, num_pairs)


def num_bins(num_experts: int, max_slots: int, with_base: bool) -> int:
    """Counters of the alignment: one for each bucket, rounded up to powers of two."""
    return max(FEWEST_BINS, power_of_2(num_experts)) * slot_bins(max_slots, with_base)


class Alignment(Enum):
    """How pairs are put into the order of their tiles. Each way gives the same tables.

    SORTED_AT_ONCE: one program sorts all pairs in its registers, which needs no counters.
    COMPARED: programs compare a few pairs each with all others, which needs none either.
    COUNTED: launches of their own count the pairs of each span by bucket.
    SORTED: a radix sort, where a program cannot hold a counter of each bucket, or memory should not
        hold those of every span.
    """

    SORTED_AT_ONCE = auto()
    COMPARED = auto()
    COUNTED = auto()
    SORTED = auto()


def plan_alignment(
    num_pairs: int, num_experts: int, max_slots: int, with_base: bool, tuning: Tuning = DEFAULT
) -> Alignment:
    """The way for a batch of `num_pairs` pairs."""
    bins, align = num_bins(num_experts, max_slots, with_base), tuning.align
    if _keys_fit(num_pairs, bins):
        if num_pairs <= align.pairs_at_once:
            return Alignment.SORTED_AT_ONCE
        if num_pairs <= align.compared_pairs:
            return Alignment.COMPARED
    if bins > align.most_bins or _num_counters(num_pairs, bins, tuning) > align.most_counters:
        return Alignment.SORTED
    return Alignment.COUNTED


def block_of_pairs(num_pairs: int) -> int:
    """Of a program that sorts all pairs, or compares a few with all: few sizes, each of which is a
    compiled kernel."""
    return max(64, power_of_2(num_pairs))


def _keys_fit(num_pairs: int, bins: int) -> bool:
    """Whether the keys of pairs that are sorted without counters fit into int32: a bucket, or none,
    and the number of a pair."""
    return (bins + 1) * block_of_pairs(num_pairs) <= 1 << 31


def scratch_size(
    max_pairs: int, num_experts: int, max_slots: int, with_base: bool, tuning: Tuning = DEFAULT
) -> int:
    """Elements of the scratch memory of the alignment of batches of up to `max_pairs` pairs."""
    bins, align = num_bins(num_experts, max_slots, with_base), tuning.align
    way = plan_alignment(max_pairs, num_experts, max_slots, with_base, tuning)
    # of a smaller batch that is compared: its keys
    compared = min(max_pairs, align.compared_pairs)
    if way is Alignment.COUNTED:
        return max(compared, _num_counters(max_pairs, bins, tuning))
    if way is not Alignment.SORTED:
        return compared if way is Alignment.COMPARED else 1
    most = max(digit_bins(num_experts, slot_bins(max_slots, with_base)))
    # two buffers of keys and of pairs, and the counters of a digit for each span and their totals
    size = 4 * sort_stride(max_pairs) + (sort_spans(max_pairs, align.span) + 1) * most
    # smaller batches may have few enough counters
    return size if bins > align.most_bins else max(size, align.most_counters)


def _num_counters(num_pairs: int, bins: int, tuning: Tuning) -> int:
    """One row of counters for each span, one of totals and three of offsets."""
    return (-(-num_pairs // tuning.align.span) + 4) * bins


def digit_bins(num_experts: int, bins_of_slots: int) -> tuple[int, int]:
    """Counters of a pass over the slots of the keys that are sorted, and of one over their experts;
    one more of these for pairs without expert."""
    return max(16, bins_of_slots), max(16, power_of_2(num_experts + 1))


def sort_spans(num_pairs: int, span: int) -> int:
    """Programs of a pass, each of which takes `span` pairs."""
    return max(1, -(-num_pairs // span))


def sort_stride(num_pairs: int) -> int:
    """Elements of a buffer of sorted pairs, so that the next one is aligned for every batch size:
    kernels are compiled anew for pointers of another alignment."""
    return -(-num_pairs // 64) * 64


def slot_bins(max_slots: int, with_base: bool) -> int:
    """Counters of an expert; base rows have one of their own where they are tiled."""
    return power_of_2(max_slots + with_base)
