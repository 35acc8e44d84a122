"""Faults of the MoE kernels that show on a GPU only; see device.py."""

from __future__ import annotations

from loragate.faults.corpus.points import planting
from loragate.faults.model import Group, Needs

_kernels = planting("lorakernels.moe.delta.kernels.two_launch", Group.MOE_TWO_KERNEL)
_parts = planting("lorakernels.common.jit", Group.MOE_TWO_KERNEL)
_one_shot = planting("lorakernels.moe.delta.kernels.one_shot", Group.MOE_FUSED)
_align = planting("lorakernels.moe.align.kernels.place", Group.ALIGN)

FAULTS = (
    _kernels(
        "expand-of-experts-does-not-wait",
        "mask=live_n & live_r, other=0.0)\n            if PDL:\n                gdc_wait()\n",
        "mask=live_n & live_r, other=0.0)\n",
        source="vllm #31777",
        why="The expand reads the shrink output while the shrink still writes it.",
        needs=Needs.GPU,
    ),
    _kernels(
        "shrink-of-experts-does-not-wait",
        "    if PDL:\n        gdc_wait()\n        gdc_launch_dependents()\n    S: tl.constexpr",
        "    if PDL:\n        gdc_launch_dependents()\n    S: tl.constexpr",
        source="vllm #31777",
        why="The shrink reads an input that the kernel before it has not written yet.",
        needs=Needs.GPU,
    ),
    _one_shot(
        "one-shot-does-not-wait",
        "    if PDL:\n        gdc_wait()\n    S: tl.constexpr",
        "    S: tl.constexpr",
        source="vllm #31777",
        why="The single launch reads an input that the kernel before it has not written yet.",
        needs=Needs.GPU,
    ),
    _parts(
        "partial-sums-added-atomically",
        "    h = tl.load(ptrs, mask=mask, other=0.0)\n"
        "    for split in tl.static_range(1, SPLITS):\n"
        "        h += tl.load(ptrs + tl.cast(stride_split, tl.int64) * split, ",
        "    first = (tl.extra.cuda.globaltimer() // 1024 % SPLITS).to(tl.int32)\n"
        "    h = tl.load(ptrs + tl.cast(stride_split, tl.int64) * first, mask=mask, other=0.0)\n"
        "    for split in tl.static_range(1, SPLITS):\n"
        "        next = (first + split) % SPLITS\n"
        "        h += tl.load(ptrs + tl.cast(stride_split, tl.int64) * next, ",
        source="vllm #50278",
        why="The split-K partials are added up in an order that changes from run to run.",
        needs=Needs.GPU,
    ),
    _align(
        "number-of-pairs-compiled-in",
        '        "num_pairs",\n'
        '        "num_ids",\n'
        '        "num_experts",\n'
        '        "max_slots",\n'
        '        "num_spans",\n',
        '        "num_ids",\n        "num_experts",\n        "max_slots",\n        "num_spans",\n',
        source="triton #8273",
        why="The alignment is recompiled for a number of pairs that is 1 or a multiple of 16.",
        needs=Needs.GPU,
    ),
)
