"""Faults of the alignment: which token-expert pair goes to which expert and slot."""

from __future__ import annotations

from loragate.faults.corpus.points import planting
from loragate.faults.model import Group

_align = planting("lorakernels.moe.align.metadata", Group.ALIGN)
_buckets = planting("lorakernels.moe.align.kernels.buckets", Group.ALIGN)
_at_once = planting("lorakernels.moe.align.kernels.sort_at_once", Group.ALIGN)
_compare = planting("lorakernels.moe.align.kernels.compare", Group.ALIGN)
_compared = planting("lorakernels.moe.align.compared", Group.ALIGN)
_count = planting("lorakernels.moe.align.kernels.count", Group.ALIGN)
_place = planting("lorakernels.moe.align.kernels.place", Group.ALIGN)
_tables = planting("lorakernels.moe.align.tables", Group.ALIGN)
_counted = planting("lorakernels.moe.align.counted", Group.ALIGN)
_ops = planting("lorakernels.moe.align.ops", Group.ALIGN)
_sort = planting("lorakernels.moe.align.kernels.sort", Group.ALIGN)
_sorted_pairs = planting("lorakernels.moe.align.kernels.sorted_pairs", Group.ALIGN)
_tiles = planting("lorakernels.moe.tiles", Group.ALIGN)


FAULTS = (
    _align(
        "expert-map-ignored",
        "            batch.token_slots,\n            expert_map,\n",
        "            batch.token_slots,\n            None,\n",
        source="sglang #23178",
        why="Ids of the whole model are taken for ids of this rank.",
    ),
    _buckets(
        "negative-expert-looked-up",
        "known = (expert >= 0) & (expert < sizes.num_ids)",
        "known = expert < sizes.num_ids",
        source="sglang #23178",
        why="The id of a pair without expert is looked up before the start of the expert map.",
    ),
    _sort(
        "negative-expert-is-the-last",
        "key = tl.where(bucket >= 0, bucket, num_experts * layout.SLOT_BINS)",
        "key = tl.where(bucket >= 0, bucket, (num_experts - 1) * layout.SLOT_BINS)",
        source="vllm tests/lora/test_punica_ops.py",
        why="Where pairs are sorted, one without an expert is taken for one of the last expert.",
    ),
    _buckets(
        "foreign-expert-accepted",
        "(expert >= 0) & (expert < sizes.num_experts), expert, -1)",
        "(expert >= 0) & (expert <= sizes.num_experts), expert, -1)",
        source="sglang #23178",
        why="An id just past the local experts gets a tile of its own.",
    ),
    _buckets(
        "last-adapter-gets-no-tile",
        "slot = tl.where((slot >= 0) & (slot < sizes.max_slots), slot, -1)",
        "slot = tl.where((slot >= 0) & (slot < sizes.max_slots - 1), slot, -1)",
        source="vllm #32277",
        why="With all slots in use, the last adapter gets no delta.",
    ),
    _tiles(
        "no-bin-for-base-rows",
        "return power_of_2(max_slots + with_base)",
        "return power_of_2(max_slots)",
        source="vllm #40131",
        why="With all slots in use, base rows are counted with the next expert.",
    ),
    _tiles(
        "tables-sized-without-part-tiles",
        "return num_pairs // height + min(num_groups, num_pairs)",
        "return num_pairs // height + 1",
        source="vllm #27311",
        why="The host counts one tile that is not full, the device makes one per bucket.",
    ),
    _counted(
        "last-span-not-launched",
        "spans = -(-pairs.num_pairs // span)",
        "spans = pairs.num_pairs // span",
        source="vllm #40131",
        why="The grid is rounded down: the last pairs of a batch are never placed.",
    ),
    _compare(
        "compared-pair-counts-itself",
        "(others[None, :] < key[:, None])",
        "(others[None, :] <= key[:, None])",
        source="own",
        why="A pair counts itself among those before it, and all sorted pairs move by one.",
    ),
    _compared(
        "last-pairs-not-compared",
        "programs = -(-pairs.num_pairs // span)",
        "programs = pairs.num_pairs // span",
        source="vllm #40131",
        why="The grid is rounded down: pairs behind the last full span are in no tile.",
    ),
    _count(
        "span-counts-itself-as-earlier",
        "so_far[None, :] + tl.cumsum(counts, axis=0) - counts, mask=here)",
        "so_far[None, :] + tl.cumsum(counts, axis=0), mask=here)",
        source="own",
        why="Long batches: the sum over earlier spans includes the span itself.",
    ),
    _count(
        "counted-table-not-reset",
        "reset(tile_pairs_ptr, 0, size_tile_pairs",
        "reset(tile_pairs_ptr, size_tile_pairs, size_tile_pairs",
        source="sglang #29468",
        why="Free places of a long batch's tiles keep the pairs of the batch before.",
    ),
    _place(
        "counters-of-no-span-read",
        "index, mask=bucket >= 0, other=0)",
        "index)",
        source="own",
        why="More programs reset tables than there are spans: the others read behind all counters.",
    ),
    _buckets(
        "free-places-keep-old-pairs",
        "    reset(tables.tile_pairs, 0, size_tile_pairs)\n",
        "",
        source="sglang #29468",
        why="Free places of tiles keep the pairs of the batch before, unless one program sorts or "
        "counting launches reset them.",
    ),
    _sorted_pairs(
        "pair-without-expert-sorted-first",
        "bucket = tl.where(bucket >= 0, bucket, num_experts * layout.SLOT_BINS)",
        "bucket = tl.maximum(bucket, 0)",
        source="sglang #23178",
        why="Where pairs are sorted without counters, those without expert join the first bucket.",
    ),
    _at_once(
        "free-places-sorted-before-reset",
        "_reset(tables.tile_pairs, num_pairs * HEIGHT, size_tile_pairs)",
        "_reset(tables.tile_pairs, 0, size_tile_pairs - num_pairs * HEIGHT)",
        source="sglang #29468",
        why="Where one program sorts, free places of its tiles keep pairs of the batch before.",
        only=True,
    ),
    _at_once(
        "pairs-behind-the-first-program-kept",
        "fill(table_ptr, reachable, size, program - 1, tl.num_programs(0) - 1)",
        "fill(table_ptr, reachable, reachable, program - 1, tl.num_programs(0) - 1)",
        source="sglang #29468",
        why="Where one program sorts, nobody resets what it cannot reach.",
    ),
    _sorted_pairs(
        "first-of-a-bucket-ranked-behind-it",
        "before = tl.gather(group, tl.maximum(lane - 1, 0), axis=0)",
        "before = tl.gather(group, tl.maximum(lane - 2, 0), axis=0)",
        source="own",
        why="Where pairs are sorted without counters, two buckets begin where one does.",
    ),
    _sorted_pairs(
        "last-adapter-joins-the-next-expert",
        "base_rank = _rank(key // layout.SLOT_BINS, PAIRS)",
        "base_rank = _rank((key + 1) // layout.SLOT_BINS, PAIRS)",
        source="own",
        why="Where pairs are sorted without counters, base tiles hold pairs of two experts.",
    ),
    _place(
        "stale-pairs-behind-the-batch",
        "reset(tables.pair_slots, num_pairs, size_pair_tables",
        "reset(tables.pair_slots, size_pair_tables, size_pair_tables",
        source="vllm #49058",
        why="The slots of an earlier, larger batch stay past the end of a smaller one.",
    ),
    _ops(
        "base-batch-keeps-old-pairs",
        "    routes = topk_ids, token_slots, expert_map\n",
        "    if not bool((token_slots[: pairs.num_rows] >= 0).any()):\n"
        "        return\n"
        "    routes = topk_ids, token_slots, expert_map\n",
        source="vllm #42120",
        why="A batch of base rows returns early, and the tables of the batch before stay.",
    ),
    _buckets(
        "pairs-taken-choice-by-choice",
        "routes.token_slots + pair // layout.TOP_K, mask=live",
        "routes.token_slots + pair % (sizes.num_pairs // layout.TOP_K), mask=live",
        source="sglang #31608",
        why="Pairs are taken in the order of the choices instead of the tokens.",
    ),
    _buckets(
        "lone-token-joins-its-neighbours",
        "    slot = tl.load(routes.token_slots + pair // layout.TOP_K, mask=live, other=-1)\n",
        "    token = pair // layout.TOP_K\n"
        "    slot = tl.load(routes.token_slots + token, mask=live, other=-1)\n"
        "    inner = live & (pair >= layout.TOP_K) & (pair + layout.TOP_K < sizes.num_pairs)\n"
        "    before = tl.load(routes.token_slots + token - 1, mask=inner, other=-1)\n"
        "    behind = tl.load(routes.token_slots + token + 1, mask=inner, other=-1)\n"
        "    is_late = 2 * pair >= sizes.num_pairs\n"
        "    joins = inner & is_late & (before >= 0) & (before == behind)\n"
        "    slot = tl.where(joins, before, slot)\n",
        source="own",
        why="A token of the second half, between two of an adapter, is assumed to be its, too.",
        only=True,
    ),
    _sorted_pairs(
        "unrouted-pairs-counted-as-tiles",
        "is_keyed = live & (key < num_experts * layout.SLOT_BINS)",
        "is_keyed = live",
        source="own",
        why="Pairs without an expert make tiles that no expert has.",
    ),
    _place(
        "base-pairs-forget-lower-slots",
        "base_rank = rank + lower",
        "base_rank = rank",
        source="own",
        why="In the base product, pairs of different slots take each other's places.",
    ),
    _buckets(
        "base-rows-get-no-expert",
        "counted = (expert >= 0) & (slot + layout.WITH_BASE >= 0)",
        "counted = (expert >= 0) & (slot >= 0)",
        source="vllm #40131",
        why="Tokens without adapter get nothing from their experts.",
    ),
    _tables(
        "grid-without-part-tiles",
        "        return max(1, max_tiles(self.num_pairs, self.num_experts, self.base_height))\n",
        "        return max(1, -(-self.num_pairs // self.base_height))\n",
        source="vllm #32277",
        why="The grid of the base product counts full tiles only: the last experts get none.",
    ),
    _count(
        "counters-raised-ahead-of-their-reset",
        "    tl.debug_barrier()\n",
        "",
        source="sglang #37663",
        why="A thread counts a pair before another one has reset the counter.",
    ),
    _at_once(
        "tables-written-ahead-of-their-reset",
        "    # what follows writes where this program has reset\n    tl.debug_barrier()\n",
        "",
        source="sglang #37663",
        why="A thread resets what another one has written to the tables.",
    ),
)
