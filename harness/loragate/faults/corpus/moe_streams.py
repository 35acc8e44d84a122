"""Faults of MoE layers on several streams."""

from __future__ import annotations

from loragate.faults.corpus.points import planting
from loragate.faults.model import Group

_launch = planting("lorakernels.moe.layer.launch", Group.STREAMS)
_ops = planting("lorakernels.moe.layer.ops", Group.STREAMS)
_steps = planting("lorakernels.batch.steps", Group.STREAMS)
_layer = planting("lorakernels.layers.moe", Group.STREAMS)
_shared = planting("lorakernels.layers.moe_shared", Group.STREAMS)
_align = planting("lorakernels.moe.align.ops", Group.STREAMS)

_REST = "launch_gemm(replace(product, x=sums, bias=None), delta, pdl=False, part=_Part.REST)\n"
_CUT = f"    fork_join(sums.device, multiply, *sides)\n    {_REST}"
_SUMS = "    sums = product.out.new_empty(pairs.num_pairs, columns, dtype=torch.float32)\n"
_MULTIPLY = "    def multiply() -> None:\n"
_SHARED_FORK = (
    "    out = fork_join(x.device, routed, beside)\n    return out.view(x.shape).add_(added)\n"
)
_BESIDE = "    def beside() -> None:\n        found = shared(x)\n"

FAULTS = (
    _launch(
        "moe-rest-of-a-product-before-the-join",
        _CUT,
        "    def both() -> None:\n"
        "        multiply()\n"
        f"        {_REST}\n"
        "    fork_join(sums.device, both, *sides)\n",
        source="vllm #42290",
        why="The expand reads shrink outputs while the side still writes them.",
    ),
    _launch(
        "moe-rest-of-a-product-on-the-side",
        _CUT,
        "    def both() -> None:\n"
        "        for side in sides:\n"
        "            side()\n"
        f"        {_REST}\n"
        "    fork_join(sums.device, multiply, both)\n",
        source="vllm #42290",
        why="The expand starts behind its shrink, and reads sums that are not complete.",
    ),
    _launch(
        "moe-product-behind-the-join",
        _CUT.splitlines(keepends=True)[0],
        "    fork_join(sums.device, lambda: None, *sides)\n    multiply()\n",
        source="vllm #34933",
        why="A fork that serialises: the product starts when its shrink is done.",
    ),
    _launch(
        "moe-shrink-output-cleared-beside-the-shrink",
        _MULTIPLY,
        f"{_MULTIPLY}        delta.shrunk.zero_()\n",
        source="vllm #42290",
        why="The workspace is cleared on the main stream while the side writes it.",
    ),
    _launch(
        "moe-sums-kept-for-all-layers",
        _SUMS,
        f"{_SUMS}"
        "    key = (pairs.num_pairs, columns, sums.device)\n"
        '    sums = globals().setdefault("_KEPT", {}).setdefault(key, sums)\n',
        source="sglang #28091",
        why="Layers that run beside each other keep their sums in one buffer.",
    ),
    _launch(
        "moe-sums-freed-before-their-use",
        _CUT,
        "    fork_join(sums.device, multiply, *sides)\n"
        "    with torch.cuda.stream(torch.cuda.Stream()):\n"
        f"        {_REST}",
        source="local-inference-lab #93",
        why="A stream that nobody waits for reads sums that are back at the allocator.",
    ),
    _ops(
        "moe-both-products-beside-each-other",
        "        run(first, lambda: first)\n        run(second, base_of_second)\n",
        "        from lorakernels.runtime.streams import fork_join\n\n"
        "        fork_join(\n"
        "            x.device,\n"
        "            lambda: run(second, base_of_second),\n"
        "            lambda: run(first, lambda: first),\n"
        "        )\n",
        source="vllm #42290",
        why="One fork for both products: the second one reads what the first one still writes.",
    ),
    _ops(
        "moe-activation-quantised-in-place",
        "replace(second, x=quantise_rows(act))",
        "replace(second, x=quantise_rows(act.clamp_(-6e4, 6e4)))",
        source="sglang #31870",
        why="Write after read: the main stream changes what the shrink of w2 still reads.",
    ),
    _ops(
        "moe-form-ignored",
        "        if form is MoEForm.DUAL and product.lora is not None:\n",
        "        if form is MoEForm.BESIDE and product.lora is not None:\n",
        source="vllm #34933",
        why="The form with shrinks beside their products runs on one stream.",
    ),
    _ops(
        "moe-scratch-not-claimed",
        '    claim(act, "scratch")\n',
        "",
        source="sglang #21647",
        why="Layers that run beside each other write one activation, and nothing says so.",
    ),
    _steps(
        "moe-capture-is-not-noticed",
        "    return not known.is_declared and is_capturing(device)\n",
        "    return False\n",
        source="vllm #43139",
        why="A graph that is captured with base rows alone has no adapters for other batches.",
    ),
    _align(
        "moe-adapters-known-from-the-first-step",
        "    hand_on_base_rows(batch_rows, step, topk_ids.device)\n",
        "    from lorakernels.batch.steps import base_rows\n"
        "    if base_rows(step) is not None:\n"
        "        return note_rows(step, pairs.num_rows)\n"
        "    hand_on_base_rows(batch_rows, step, topk_ids.device)\n",
        source="vllm #42008",
        why="Pairs that once had no adapter are never sorted again.",
    ),
    _layer(
        "moe-alignment-not-waited-for",
        "            pairs.prepare(ids, batch, expert_map=expert_map)\n",
        "            with torch.cuda.stream(torch.cuda.Stream()):\n"
        "                pairs.prepare(ids, batch, expert_map=expert_map)\n",
        source="vllm #42290",
        why="The alignment has a stream of its own, and its tables are read too early.",
    ),
    _shared(
        "moe-shared-experts-added-before-the-join",
        _SHARED_FORK,
        "    return fork_join(\n"
        "        x.device, lambda: routed().view(x.shape).add_(added), beside\n"
        "    )\n",
        source="vllm #34933",
        why="The outputs of the shared experts are added while the side still writes them.",
    ),
    _shared(
        "moe-shared-experts-allocated-on-the-side",
        "        added.copy_(found)\n",
        "        nonlocal added\n        added = found\n",
        source="local-inference-lab #93",
        why="What a side allocates leaves it: freed, it is reused beside the sum that reads it.",
    ),
    _shared(
        "moe-shared-experts-added-to-nothing",
        "        added.copy_(found)\n",
        "        added.add_(found)\n",
        source="vllm #29316",
        why="The outputs of the shared experts are added to memory that nobody has written.",
    ),
    _shared(
        "moe-shared-input-freed-while-the-side-reads",
        _BESIDE,
        "    kept = [x.clone()]\n\n    def beside() -> None:\n        found = shared(kept.pop())\n",
        source="local-inference-lab #93",
        why="A copy of the input returns to the allocator while the shared experts read it.",
    ),
    _shared(
        "moe-shared-experts-before-the-routed-ones",
        _SHARED_FORK,
        "    fork_join(x.device, lambda: None, beside)\n"
        "    return routed().view(x.shape).add_(added)\n",
        source="vllm #34933",
        why="The routed experts wait for the shared ones, which run beside nothing.",
    ),
    _shared(
        "moe-shared-experts-never-beside",
        "    return form is not MoEForm.SINGLE\n",
        "    return form is MoEForm.DUAL\n",
        source="vllm #34933",
        why="The form that the plan takes with the switch on runs on one stream.",
    ),
)
