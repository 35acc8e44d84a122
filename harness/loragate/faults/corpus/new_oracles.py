"""Faults that only isolation, range, work, batch_invariance or queue detect, and errors that drown
in the rounding of each element."""

from __future__ import annotations

from loragate.faults.corpus.points import planting
from loragate.faults.model import Group, Needs

_dense = planting("lorakernels.dense.kernels", Group.SHRINK)
_expand = planting("lorakernels.dense.kernels", Group.EXPAND)
_metadata = planting("lorakernels.batch.metadata", Group.METADATA)
_two_launch = planting("lorakernels.moe.delta.kernels.two_launch", Group.MOE_TWO_KERNEL)
_small_batch = planting("lorakernels.moe.delta.kernels.small_batch", Group.MOE_FUSED)

FAULTS = (
    _expand(
        "unwanted-b-times-zero",
        "                b = tl.load(b_ptrs, mask=live_n & live_r, other=0.0)\n"
        "                if PDL:\n"
        "                    gdc_wait()\n"
        "            h = ",
        "                b = tl.load(b_ptrs, mask=live_n & live_r, other=0.0)\n"
        "                if PDL:\n"
        "                    gdc_wait()\n"
        "            first_slot = b_ptr + columns[None, :] * R + offs_r[:, None]\n"
        "            b += 0.0 * tl.load(first_slot, mask=live_n & live_r, other=0.0)\n"
        "            h = ",
        source="own",
        why="The B of two slots are blended, and the one that is not wanted is multiplied by zero.",
        only=True,
    ),
    _small_batch(
        "unwanted-b-of-experts-times-zero",
        "(offs_r < loaded_rank)[None, :], other=0.0)\n        out_ptrs",
        "(offs_r < loaded_rank)[None, :], other=0.0)\n"
        "        first_slot = b_ptrs - slot.to(tl.int64) * stride_b_slot\n"
        "        b += 0.0 * tl.load(first_slot, mask=live_n[:, None] & (offs_r < R)[None, :], "
        "other=0.0)\n"
        "        out_ptrs",
        source="own",
        why="The B of two slots are blended, and the one that is not wanted is multiplied by zero.",
        only=True,
    ),
    _dense(
        "every-dtype-clamped-like-fp16",
        "tl.store(row_ptrs + offs_n[None, :], acc, mask=live_cells)",
        "tl.store(row_ptrs + offs_n[None, :], tl.minimum(tl.maximum(acc, -65504.0), 65504.0), "
        "mask=live_cells)",
        source="own",
        why="The shrink output is kept within the range of fp16 for adapters of any dtype.",
        only=True,
    ),
    _two_launch(
        "every-expert-clamped-like-fp16",
        "acc.to(shrunk_ptr.dtype.element_ty), mask=live_cells",
        "tl.minimum(tl.maximum(acc, -65504.0), 65504.0), mask=live_cells",
        source="own",
        why="The shrink output is kept within the range of fp16 for adapters of any dtype.",
        only=True,
    ),
    _dense(
        "slots-before-walked-over",
        "        live_rank = tl.load(ranks_ptr + slot * S + offs_n // R, mask=offs_n < SR, "
        "other=0)\n",
        "        live_rank = tl.zeros([BLOCK_N], dtype=tl.int32)\n"
        "        for before in range(0, slot + 1):\n"
        "            ranks_of_slot = ranks_ptr + before * S + offs_n // R\n"
        "            live_rank = tl.load(ranks_of_slot, mask=offs_n < SR, other=0)\n",
        source="own",
        why="The rank of a slot is found by reading those of all slots before it.",
        only=True,
    ),
    _small_batch(
        "slots-of-experts-walked-over",
        "    rank = tl.load(ranks_ptr + tl.maximum(slot, 0) * S + slice_id)\n",
        "    rank = slice_id * 0\n"
        "    for before in range(0, tl.maximum(slot, 0) + 1):\n"
        "        rank = tl.load(ranks_ptr + before * S + slice_id)\n",
        source="own",
        why="The rank of a slot is found by reading those of all slots before it.",
        only=True,
    ),
    _dense(
        "tile-centred-on-its-peak",
        "            row_ptrs = split_ptr + (tile * HEIGHT",
        "            peak = tl.max(tl.max(tl.abs(acc), axis=1), axis=0)\n"
        "            acc = (acc + peak) - peak\n"
        "            row_ptrs = split_ptr + (tile * HEIGHT",
        source="own",
        why="Sums are shifted by the largest one of their tile, which rounds them by it.",
        only=True,
    ),
    _two_launch(
        "tile-of-experts-centred-on-its-peak",
        "            live_cells = live_m",
        "            peak = tl.max(tl.max(tl.abs(acc), axis=1), axis=0)\n"
        "            acc = (acc + peak) - peak\n"
        "            live_cells = live_m",
        source="own",
        why="Sums are shifted by the largest one of their tile, which rounds them by it.",
        only=True,
    ),
    _dense(
        "sums-rounded-before-the-scale",
        "tl.store(row_ptrs + offs_n[None, :], acc, mask=live_cells)",
        "tl.store(row_ptrs + offs_n[None, :], acc.to(x_ptr.dtype.element_ty), mask=live_cells)",
        source="own",
        why="Sums over in_features are rounded when they are stored, and again with their scale.",
    ),
    _expand(
        "scale-through-bf16",
        "        scale = tl.load(scales_ptr + slot * S + slice_id)\n",
        "        scale = tl.load(scales_ptr + slot * S + slice_id)\n"
        "        scale = scale.to(tl.bfloat16).to(tl.float32)\n",
        source="own",
        why="The scale has eight bits, and is off by up to 0.4 %.",
    ),
    _metadata(
        "mapping-read-where-it-lies",
        "token_slots = upload(token_slots, self.token_slots.device)",
        "token_slots = token_slots.to(self.token_slots.device, non_blocking=True)",
        source="vllm #36013",
        why="A mapping in pinned memory is read when the device gets to it.",
        needs=Needs.GPU,
    ),
)
