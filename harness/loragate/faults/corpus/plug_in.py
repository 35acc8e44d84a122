"""Faults of the plug-in of vLLM: adoption, metadata of a step, captures, registration."""

from __future__ import annotations

from loragate.faults.corpus.points import planting
from loragate.faults.model import Group

_PACKAGE = "lorakernels.integrations.vllm"
_declaration = planting(f"{_PACKAGE}.declaration", Group.PLUG_IN)
_methods = planting(f"{_PACKAGE}.methods", Group.PLUG_IN)
_tables = planting(f"{_PACKAGE}.tables", Group.PLUG_IN)
_experts = planting(f"{_PACKAGE}.experts", Group.PLUG_IN)
_packing = planting("lorakernels.common.slice_stacks", Group.PLUG_IN)
_adoption = planting(f"{_PACKAGE}.adoption", Group.PLUG_IN)
_registration = planting(f"{_PACKAGE}.registration", Group.PLUG_IN)
_contract = planting(f"{_PACKAGE}.contract", Group.PLUG_IN)

_TOKENS = "        self.token_step.prepare(state.token_lora_indices)\n"

FAULTS = (
    _declaration(
        "plug-in-captures-what-the-dummy-run-mapped",
        "    leaves_out = DECLARATION.without_adapters(no_lora) if captures else "
        "host_value(no_lora) != 0\n",
        "    leaves_out = host_value(no_lora) != 0\n",
        source="vllm #43139",
        why="A dummy run without its adapters captures graphs that serve the base model.",
    ),
    _declaration(
        "plug-in-declaration-outlives-its-step",
        "        if not self._is_dummy:\n            self._adapters = None\n",
        "        return\n",
        source="vllm #43314",
        why="What a dummy run declared holds for graphs that are captured from later steps.",
    ),
    _declaration(
        "plug-in-declaration-is-of-every-wrapper",
        "        return self._adapters == 0 and self.is_of(flag)\n",
        "        return self._adapters == 0\n",
        source="own",
        why="Graphs of a tower, captured behind those of the language model, lose its adapters.",
    ),
    _declaration(
        "plug-in-graph-of-a-tower-takes-the-rows-of-a-step",
        "    return not DECLARATION.is_of(no_lora) and is_capturing(device)\n",
        "    return False\n",
        source="own",
        why="A step of more images than the graph of a tower has is written behind its rows.",
    ),
    _methods(
        "plug-in-mapping-is-memoised",
        _TOKENS,
        f"        if len(state.token_lora_indices) != int(self.token_step.live):\n    {_TOKENS}",
        source="own",
        why="A step with as many rows as the one before keeps the mapping of that one.",
    ),
    _methods(
        "plug-in-base-step-keeps-the-tables",
        _TOKENS,
        f"        if not bool(state.token_mapping_meta.no_lora_flag_cpu):\n    {_TOKENS}",
        source="vllm #42120",
        why="A step without adapters replays a graph with those of the step before.",
    ),
    _methods(
        "plug-in-logits-use-the-token-mapping",
        "        self.sample_step.prepare(state.sampler_indices)\n",
        "        self.sample_step.prepare(state.token_lora_indices)\n",
        source="vllm #16668",
        why="The logits of a request get the adapter of a token of another one.",
    ),
    _methods(
        "plug-in-router-weights-dropped",
        "                router_weights=topk_weights.float().contiguous(),\n",
        "                router_weights=None,\n",
        source="vllm #41754",
        why="The deltas of the experts of a token are added without their weights.",
    ),
    _tables(
        "plug-in-prompt-logits-use-the-tables-of-samples",
        "    step.prepare(row_slots[:num_rows])\n",
        "    step.prepare(row_slots[-num_rows:])\n",
        source="vllm #16668",
        why="Logits of a prompt have fewer rows than are mapped, and get the tables of others.",
    ),
    _tables(
        "plug-in-tables-of-the-live-height-only",
        "        for step in self._steps:\n            step.prepare(slots)\n",
        "        for step in self._steps:\n"
        "            if step.height_of(1) == tile_height(len(slots), step.tuning):\n"
        "                step.prepare(slots)\n",
        source="own",
        why="A graph of padded rows, whose tiles are higher, reads the tables of an earlier step.",
    ),
    _experts(
        "plug-in-swapped-slices-stay-in-order",
        "        if not factors.is_swapped:\n",
        "        if factors:\n",
        source="own",
        why="Experts that want up before gate get the deltas of gate and up exchanged.",
    ),
    _experts(
        "plug-in-swapped-slices-taken-as-packed",
        "    is_swapped = a[0].storage_offset() > a[-1].storage_offset()\n",
        "    is_swapped = False\n",
        source="own",
        why="Reversed slices are read from the place of the second one.",
    ),
    _experts(
        "plug-in-remembers-experts-without-their-place",
        "    return part.data_ptr(), part.shape, part.stride(), part.dtype\n",
        "    return part.shape, part.stride(), part.dtype\n",
        source="own",
        why="A layer gets the adapters of another one whose stacks have the same shapes.",
    ),
    _experts(
        "plug-in-remembers-experts-by-a-alone",
        "        key = tuple(map(_place, (*a, *b)))\n",
        "        key = tuple(map(_place, a))\n",
        source="own",
        why="Slices of other widths in the same memory get the widths of the first ones.",
    ),
    _experts(
        "plug-in-remembers-experts-without-their-strides",
        "    return part.data_ptr(), part.shape, part.stride(), part.dtype\n",
        "    return part.data_ptr(), part.shape, part.dtype\n",
        source="own",
        why="A stack whose values lie in another order is not refused, and is read wrongly.",
    ),
    _packing(
        "plug-in-packs-b-of-the-first-slice-only",
        "    for view, old in zip((*views_a, *views_b), (*a, *b), strict=True):\n",
        "    for view, old in zip((*views_a, *views_b[:1]), (*a, *b[:1]), strict=True):\n",
        source="own",
        why="Adapters of a layer whose stacks were not empty lose parts when it is adopted.",
    ),
    _adoption(
        "plug-in-old-stacks-of-experts-stay-in-use",
        "    layer.w13_lora_a_stacked, layer.w13_lora_b_stacked = new_a, new_b\n",
        "",
        source="own",
        why="vLLM loads adapters into stacks that no kernel reads.",
    ),
    _adoption(
        "plug-in-lists-keep-the-old-stacks",
        '    if isinstance(getattr(layer, "lora_a_stacked", None), list):\n',
        '    if isinstance(getattr(layer, "lora_a_stacked", None), tuple):\n',
        source="own",
        why="The adapters of experts take twice their memory.",
    ),
    _adoption(
        "plug-in-serves-layers-that-it-refused",
        "        return wrapper.stock\n",
        "        return wrapper\n",
        source="own",
        why="A layer of unknown behaviour gets kernels that do not fit its stacks.",
    ),
    _adoption(
        "plug-in-serves-experts-of-data-parallel-rows",
        "        if layer.moe_config.moe_parallel_config.dp_size > 1:\n",
        "        if layer.moe_config.moe_parallel_config.dp_size > 8:\n",
        source="own",
        why="vLLM hands over rows of other ranks, which no mapping of this one has.",
    ),
    _registration(
        "plug-in-leaves-the-key-of-compiled-graphs",
        "        return digest.hexdigest()[: len(found)]\n",
        "        return found\n",
        source="vllm #55383",
        why="vLLM loads a graph with its own kernels from its cache, or with operators of old.",
    ),
    _registration(
        "plug-in-key-of-compiled-graphs-ignores-the-source",
        "        digest.update(source.read_bytes())\n",
        "        digest.update(source.name.encode())\n",
        source="vllm #55383",
        why="A graph that calls an operator as an older version did is loaded from the cache.",
    ),
    _registration(
        "plug-in-cannot-be-switched-off",
        '    return value == "1"\n',
        '    return value != ""\n',
        source="own",
        why="The variable that switches the plug-in off has no effect.",
    ),
    _contract(
        "plug-in-takes-any-later-version",
        "    if not OLDEST <= release <= NEWEST:\n",
        "    if not OLDEST <= release:\n",
        source="vllm #53555",
        why="A vLLM whose calls nobody has read is served.",
    ),
    _contract(
        "plug-in-takes-any-signature",
        "        if not found.intersection(seam.accepted):\n",
        "        if not found:\n",
        source="vllm #53555",
        why="Arguments of a method that has changed are taken for others.",
    ),
)
