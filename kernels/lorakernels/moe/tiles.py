"""How pairs are cut into tiles and counted: from shapes alone, so that all of it is constant
in a captured graph. Pure."""

from __future__ import annotations

from lorakernels.batch.metadata import MIN_TILE_ROWS
from lorakernels.common.sizes import power_of_2

# adapters of a batch that the plan counts on
USUAL_SLOTS = 4
# fuller tiles leave so little room that many a bucket needs a second one, which costs more than
# empty rows
_FULL = 0.75
# with fewer pairs tiles of 64 are too few to keep all multiprocessors busy
_PAIRS_OF_TALL_TILES = 1024


def tile_height(num_pairs: int, num_experts: int) -> int:
    """Pairs of one (expert, slot) that one tile covers. From shapes alone, so that it is a
    constant of a captured graph."""
    pairs_of_a_bucket = num_pairs / (USUAL_SLOTS * num_experts)
    if pairs_of_a_bucket < _FULL * MIN_TILE_ROWS:
        return MIN_TILE_ROWS
    return 32 if pairs_of_a_bucket < _FULL * 32 or num_pairs < _PAIRS_OF_TALL_TILES else 64


def base_tile_height(num_pairs: int, num_experts: int) -> int:
    """Pairs of one expert, whatever their slots, that one tile of the base product covers."""
    # tiles that are mostly full cost the fewest passes over an expert's weights
    return min(128, max(MIN_TILE_ROWS, power_of_2(2 * num_pairs // num_experts)))


def max_tiles(num_pairs: int, num_groups: int, height: int) -> int:
    """Most tiles a batch can need: each group of pairs adds at most one that is not full."""
    return num_pairs // height + min(num_groups, num_pairs)


def num_bins(num_experts: int, max_slots: int, with_base: bool) -> int:
    """Counters of the alignment: one for each bucket, rounded up to powers of two."""
    return max(16, power_of_2(num_experts)) * slot_bins(max_slots, with_base)


def slot_bins(max_slots: int, with_base: bool) -> int:
    """Counters of an expert; base rows have one of their own where they are tiled."""
    return power_of_2(max_slots + with_base)
