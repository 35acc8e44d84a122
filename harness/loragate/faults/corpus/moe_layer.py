"""Faults of a whole MoE layer: the base products with the expand folded in, the activation,
the sum over choices."""

from __future__ import annotations

from loragate.faults.corpus.points import planting
from loragate.faults.model import Group

_ops = planting("lorakernels.moe.layer.ops", Group.MOE_LAYER)
_kernel = planting("lorakernels.moe.layer.kernels", Group.MOE_LAYER)


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
    _kernel(
        "fold-uses-gates-b-twice",
        "b_slot + up_rows * R",
        "b_slot",
        source="unsloth-zoo #941",
        why="Gate and up are both expanded with the B of the gate.",
    ),
    _kernel(
        "fold-uses-gates-ranks-twice",
        "_terms(shrunk_ptr + R, ",
        "_terms(shrunk_ptr, ",
        source="sglang #27274",
        why="The up half is expanded from the ranks of the gate.",
    ),
    _kernel(
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
        "            acc = acc * tl.sigmoid(acc)\n",
        "            acc = acc * tl.sigmoid(up if GATED else acc)\n",
        source="own",
        why="The gate is opened by the up half.",
    ),
    _kernel(
        "rows-without-expert-summed",
        "        here = tl.load(pair_experts_ptr + pair) >= 0\n",
        "        here = pair >= 0\n",
        source="sglang #23178",
        why="The sum over choices reads rows that only another rank would have written.",
    ),
    _kernel(
        "base-product-rounded-before-the-fold",
        "            b_expert = b_ptr + expert.to(tl.int64) * stride_b_expert\n",
        "            b_expert = b_ptr + expert.to(tl.int64) * stride_b_expert\n"
        "            acc = acc.to(low).to(tl.float32)\n",
        source="own",
        why="The base product is rounded, and so is its sum with the delta.",
    ),
    _kernel(
        "delta-rounded-before-the-fold",
        "tl.where(mine[:, None], acc + delta * scale, acc)",
        "tl.where(mine[:, None], acc + (delta * scale).to(b.dtype).to(tl.float32), acc)",
        source="own",
        why="The delta is rounded, and so is its sum with the base product.",
    ),
    _kernel(
        "sum-of-choices-rounded-at-each-choice",
        "        total += tl.load(row + offs, mask=here & (offs < H), other=0.0).to(tl.float32)\n",
        "        total += tl.load(row + offs, mask=here & (offs < H), other=0.0).to(tl.float32)\n"
        "        total = total.to(out_ptr.dtype.element_ty).to(tl.float32)\n",
        source="own",
        why="A small output of an expert is lost beside the sum of the others.",
    ),
)
