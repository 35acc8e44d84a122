"""Faults of the expand kernel: out += scale * h @ B.T."""

from __future__ import annotations

from loragate.faults.corpus.points import planting
from loragate.faults.model import Group

_plant = planting("lorakernels.dense.kernels", Group.EXPAND)
_shared = planting("lorakernels.common.jit", Group.EXPAND)


FAULTS = (
    _plant(
        "base-overwritten",
        "            else:\n"
        "                previous = load_output(out_ptrs, live_m[:, None] & live_n, STORE)\n",
        "            else:\n"
        "                previous = tl.load(out_ptrs, mask=live_m[:, None] & live_n & (part < 0), "
        "other=0.0)\n",
        source="vllm #45368",
        why="The delta replaces the base output instead of being added to it.",
    ),
    _plant(
        "adapter-uses-neighbours-b",
        "b_ptr + (slot.to(tl.int64) * OUT_FEATURES",
        "b_ptr + (tl.maximum(slot - 1, 0).to(tl.int64) * OUT_FEATURES",
        source="own",
        why="Each adapter is expanded with the B of the slot before its own.",
    ),
    _plant(
        "scale-of-slot-0",
        "tl.load(scales_ptr + slot * S + slice_id)",
        "tl.load(scales_ptr + slice_id)",
        source="own",
        why="Every adapter is scaled like the one in slot 0.",
    ),
    _plant(
        "scale-of-first-slice",
        "tl.load(scales_ptr + slot * S + slice_id)",
        "tl.load(scales_ptr + slot * S)",
        source="own",
        why="All slices of a packed layer are scaled like the first one.",
    ),
    _plant(
        "scale-applied-twice",
        "        scale = tl.load(scales_ptr + slot * S + slice_id)\n",
        "        scale = tl.load(scales_ptr + slot * S + slice_id)\n"
        "        scale = scale * scale\n",
        source="peft #3111",
        why="The scale is applied twice, which does not show where it is 1.",
    ),
    _plant(
        "scale-missed-in-later-ranks",
        "h = load_shrunk(h_ptrs + r, live_h, stride_shrunk_split, SPLITS) * early",
        "h = load_shrunk(h_ptrs + r, live_h, stride_shrunk_split, SPLITS)",
        source="own",
        why="Ranks after the first block of ranks are not scaled.",
    ),
    _plant(
        "rank-tail-dropped",
        "range(BLOCK_R, R, BLOCK_R",
        "range(BLOCK_R, R - BLOCK_R + 1, BLOCK_R",
        source="vllm #55158",
        why="The last block of ranks that is not full is left out.",
    ),
    _plant(
        "dead-vectors-expanded",
        "live_r = (offs_r < loaded_rank)[:, None]",
        "live_r = (offs_r < R)[:, None]",
        source="own",
        why="B is read up to the rank of the buffers instead of the adapter's.",
        only=True,
    ),
    _shared(
        "last-partial-lost",
        "tl.static_range(1, SPLITS)",
        "tl.static_range(1, SPLITS - 1)",
        source="own",
        why="The last of the partial sums over K is not added.",
    ),
    _plant(
        "shrink-output-through-bf16",
        "acc = dot(h.to(b.dtype), b, start_of_sum(previous, LATE), IEEE)",
        "acc = dot(h.to(tl.bfloat16).to(b.dtype), b, start_of_sum(previous, LATE), IEEE)",
        source="vllm #27468",
        why="The product of x and A is rounded to bf16 for adapters of any dtype.",
    ),
    _shared(
        "equal-slices-assumed",
        "first_column += WIDTHS[s]",
        "first_column += WIDTHS[0]",
        source="punica #57",
        why="The third slice starts where it would if all were as wide as the first.",
    ),
    _shared(
        "first-group-of-slice-misplaced",
        "here = group >= first_group",
        "here = group > first_group",
        source="own",
        why="The first group of columns of each slice is assigned to the slice before.",
    ),
    _plant(
        "one-column-too-many",
        "            live_n = (offs_n < width)[None, :]\n",
        "            live_n = (offs_n <= width)[None, :]\n",
        source="own",
        why="The column after a slice is written, too.",
    ),
    _plant(
        "padding-lane-writes-row-before",
        "in_batch = rows >= 0",
        "in_batch = rows >= -1",
        source="vllm #49058",
        why="Lanes of a tile that have no row read and write the row before the first.",
    ),
    _plant(
        "parts-beyond-grid-not-taken",
        "range(first_part, num_parts, tl.num_programs(1), num_stages=1):\n        rank =",
        "range(first_part, tl.minimum(num_parts, first_part + 1), num_stages=1):\n        rank =",
        source="sglang #28371",
        why="A batch with more tiles than programs gets no delta in the rest of them.",
    ),
    _plant(
        "output-offset-in-32-bits",
        "out_ptr + rows.to(tl.int64)[:, None] * stride_om",
        "out_ptr + rows[:, None] * stride_om",
        source="vllm #53034",
        why="Row times stride of the output overflows from 2^31 elements on.",
    ),
    _plant(
        "later-columns-use-first-b",
        "b_ptrs + block * BLOCK_N * R",
        "b_ptrs + block * R * 0",
        source="punica #11",
        why="After the first block of columns a prefill repeats the first block's B.",
    ),
)
