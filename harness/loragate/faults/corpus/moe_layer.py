"""Faults of a whole MoE layer: the base products with the expand folded in, the activation,
the sum over choices."""

from __future__ import annotations

from loragate.faults.corpus.points import planting
from loragate.faults.model import Group

_ops = planting("lorakernels.moe.layer.ops", Group.MOE_LAYER)
_kernel = planting("lorakernels.moe.layer.kernels.gemm", Group.MOE_LAYER)
_fold = planting("lorakernels.moe.layer.kernels.fold", Group.MOE_LAYER)
_sum = planting("lorakernels.moe.layer.kernels.choices", Group.MOE_LAYER)
_shrink = planting("lorakernels.moe.delta.kernels.two_launch", Group.MOE_LAYER)
_launch = planting("lorakernels.moe.layer.launch", Group.MOE_LAYER)


FAULTS = (
    _ops(
        "adapters-see-quantised-rows",
        "        lora_input=x,\n",
        "        lora_input=x if quantised_x is None else quantised_x.values.to(x.dtype),\n",
        source="vllm #42120",
        why="Adapters get activations of 8 bits without their scale.",
    ),
    _ops(
        "adapters-see-quantised-activation",
        "replace(second, x=quantise_rows(act))",
        "replace(second, x=quantise_rows(act), lora_input=quantise_rows(act).values.to(act.dtype))",
        source="vllm #42120",
        why="The second product's adapters get 8 bits without their scale.",
    ),
    _kernel(
        "weight-scales-of-another-expert",
        "w_scale_ptrs = w_scales_ptr + expert * ((GATED + 1) * WIDTH) + columns",
        "w_scale_ptrs = w_scales_ptr + expert * WIDTH + columns",
        source="own",
        why="Scales of gated weights are indexed as if there was one half.",
    ),
    _ops(
        "router-weights-on-both-products",
        "        router_weights=router_weights if on_input else None,\n",
        "        router_weights=router_weights,\n",
        source="peft #3111",
        why="Router weights that belong on the output are applied to the input as well.",
    ),
    _fold(
        "fold-uses-gates-b-twice",
        "b_slot + up_rows * R",
        "b_slot",
        source="unsloth-zoo #941",
        why="Gate and up are both expanded with the B of the gate.",
    ),
    _fold(
        "fold-uses-gates-ranks-twice",
        "_terms(shrunk_ptr + R, ",
        "_terms(shrunk_ptr, ",
        source="sglang #27274",
        why="The up half is expanded from the ranks of the gate.",
    ),
    _fold(
        "tile-folded-as-one-slot",
        "        mine = slots == slot\n",
        "        mine = slots >= 0\n",
        source="own",
        why="Every pair of a tile gets the deltas of all adapters in it.",
    ),
    _kernel(
        "fold-forgets-the-expert",
        "b_expert = b_ptr + expert.to(tl.int64) * stride_b_expert",
        "b_expert = b_ptr",
        source="own",
        why="The fold expands with the B of expert 0.",
    ),
    _kernel(
        "activation-of-the-up-half",
        "        acc = acc * tl.sigmoid(acc)\n",
        "        acc = acc * tl.sigmoid(up if GATED else acc)\n",
        source="own",
        why="The gate is opened by the up half.",
    ),
    _sum(
        "rows-without-expert-summed",
        "        here = tl.load(pair_experts_ptr + pair) >= 0\n",
        "        here = pair >= 0\n",
        source="sglang #23178",
        why="The sum over choices reads rows that only another rank would have written.",
    ),
    _kernel(
        "base-product-rounded-before-the-fold",
        "            if TOGETHER:\n",
        "            acc = acc.to(low).to(tl.float32)\n            if TOGETHER:\n",
        source="own",
        why="The base product is rounded, and so is its sum with the delta.",
    ),
    _fold(
        "delta-rounded-before-the-fold",
        "tl.where(mine[:, None], acc + delta * scale, acc)",
        "tl.where(mine[:, None], acc + (delta * scale).to(b.dtype).to(tl.float32), acc)",
        source="own",
        why="The delta is rounded, and so is its sum with the base product.",
    ),
    _sum(
        "sum-of-choices-rounded-at-each-choice",
        "        total += tl.load(row + offs, mask=here & (offs < H), other=0.0).to(tl.float32)\n",
        "        total += tl.load(row + offs, mask=here & (offs < H), other=0.0).to(tl.float32)\n"
        "        total = total.to(out_ptr.dtype.element_ty).to(tl.float32)\n",
        source="own",
        why="A small output of an expert is lost beside the sum of the others.",
    ),
    _fold(
        "group-uses-gates-b-twice",
        "                    b_ptr + up_rows * R, places,",
        "                    b_ptr, places,",
        source="unsloth-zoo #941",
        why="Where slots are multiplied together, gate and up have the B of the gate.",
    ),
    _fold(
        "group-uses-gates-ranks-twice",
        "h_up = _load_h(shrunk_ptr + R, pairs,",
        "h_up = _load_h(shrunk_ptr, pairs,",
        source="sglang #27274",
        why="Where slots are multiplied together, up is expanded from the ranks of the gate.",
    ),
    _fold(
        "group-mixes-its-slots",
        "own = slots[:, None] == slot_of[None, :]",
        "own = (slots[:, None] >= 0) & (slot_of[None, :] >= 0)",
        source="own",
        why="Every pair of a tile gets the deltas of all adapters of its group.",
    ),
    _fold(
        "group-takes-the-b-of-its-first-slot",
        "places = known.to(tl.int64) * stride_b_slot + ranks_of",
        "places = tl.max(known, axis=0).to(tl.int64) * stride_b_slot + ranks_of",
        source="own",
        why="All slots of a group are expanded with the B of one of them.",
    ),
    _fold(
        "one-group-of-slots-for-each-tile",
        "            bits = bits & (bits - 1)\n        # the compiler",
        "            bits = bits & (bits - 1)\n        bits = 0\n        # the compiler",
        source="own",
        why="Slots of a tile beyond those that are multiplied together have no delta.",
    ),
    _fold(
        "slots-of-the-first-window-alone",
        "here = (slots >= window) & (slots < window + WINDOW)",
        "here = (slots >= window) & (slots < window + WINDOW) & (window == 0)",
        source="own",
        why="Adapters in slots from 31 on have no delta.",
    ),
    _fold(
        "infinite-b-of-another-slot-goes-unnoticed",
        "    return acc, up, tl.sum(spoiled, axis=0) == 0.0",
        "    return acc, up, num_slots > 0",
        source="own",
        why="0 * Inf of one adapter becomes NaN in the rows of the others.",
    ),
    _fold(
        "infinite-b-of-up-goes-unnoticed",
        "                spoiled += _spoils(b_up)\n",
        "",
        source="own",
        why="0 * Inf of one adapter becomes NaN in the up half of the others.",
    ),
    _shrink(
        "ranks-scaled-by-the-first-slice",
        "scale = tl.load(scales_ptr + slot * S + offs_n // R, ",
        "scale = tl.load(scales_ptr + slot * S + offs_n * 0, ",
        source="own",
        why="The ranks of gate and up are both stored times the scale of the gate.",
    ),
    _launch(
        "fp16-ranks-stored-times-their-scale",
        "scales_ranks=dtype is None and x.dtype == torch.bfloat16,",
        "scales_ranks=dtype is None and x.dtype != torch.float32,",
        source="own",
        why="In fp16 ranks times a scale become Inf where the result is finite.",
    ),
    _kernel(
        "depth-of-a-product-compiled-in",
        "    minus_K,\n    WIDTH",
        "    minus_K: tl.constexpr,\n    WIDTH",
        source="own",
        why="Without its K loop, ptxas 12.8 takes a descriptor from a register without a value.",
    ),
    _kernel(
        "tile-stored-again-beside-its-first-stores",
        "                tl.debug_barrier()\n",
        "",
        source="own",
        why="A tile that is computed again is overwritten by threads that store its first result.",
    ),
)
