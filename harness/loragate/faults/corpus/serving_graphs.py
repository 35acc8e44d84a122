"""Faults of steps that are replayed from graphs: keys, inputs, dummy runs, reservation."""

from __future__ import annotations

from loragate.faults.corpus.points import planting
from loragate.faults.model import Group

_keys = planting("lorakernels.serving.keys", Group.SERVING)
_inputs = planting("lorakernels.serving.inputs", Group.SERVING)
_runner = planting("lorakernels.serving.graph_runner", Group.SERVING)
_dummy = planting("lorakernels.serving.dummy", Group.SERVING)
_buffers = planting("lorakernels.serving.buffers", Group.SERVING)
_graphs = planting("lorakernels.runtime.graphs", Group.SERVING)
_staging = planting("lorakernels.runtime.staging", Group.SERVING)
_metadata = planting("lorakernels.batch.metadata", Group.SERVING)
_steps = planting("lorakernels.batch.steps", Group.SERVING)
_layer = planting("lorakernels.moe.layer.ops", Group.SERVING)
_delta = planting("lorakernels.dense.linear", Group.SERVING)

_FOUND = "    found = bisect_left(sizes, num_rows)\n"
_FLAG = "        has_adapters = batch.check(token_slots)\n"

FAULTS = (
    _keys(
        "key-rounds-down",
        _FOUND,
        "    found = max(0, sum(size <= num_rows for size in sizes) - 1)\n",
        source="vllm #36370",
        why="A batch gets the largest graph that it fills, and its last rows are not computed.",
    ),
    _keys(
        "largest-graph-for-larger-batches",
        "    return GraphKey(sizes[found], has_adapters, width) if found < len(sizes) else None\n",
        "    found = min(found, len(sizes) - 1)\n"
        "    return GraphKey(sizes[found], has_adapters, width) if sizes else None\n",
        source="own",
        why="A batch above the captured sizes is replayed, not run eagerly.",
    ),
    _keys(
        "smallest-graph-captured-first",
        "    shapes.sort(reverse=True)\n",
        "    shapes.sort()\n",
        source="own",
        why="The pool grows with each graph, as no later one fits into the memory of those before.",
    ),
    _runner(
        "adapter-flag-of-the-step-before",
        _FLAG,
        "        has_adapters = batch.check(self._inputs.token_slots.cpu())\n",
        source="vllm #42008",
        why="Whether a batch has adapters is read from the static tensor before it is written.",
    ),
    _runner(
        "adapter-flag-of-the-first-row",
        _FLAG,
        "        has_adapters = batch.check(token_slots[:1])\n",
        source="own",
        why="A batch with adapters behind a base row gets the graph without adapters.",
    ),
    _runner(
        "all-graphs-declared-without-adapters",
        "        if not key.has_adapters:\n",
        "        if rows:\n",
        source="vllm #43139",
        why="The dummy run has no adapter, and every graph serves the base model.",
    ),
    _metadata(
        "base-rows-count-as-a-declaration",
        "None if may_have else self._declared or BaseRows()\n",
        "None if may_have else BaseRows(is_declared=True)\n",
        source="vllm #43139",
        why="A graph lacks the kernels of the adapters as the batch of its capture happened to.",
    ),
    _metadata(
        "declaration-outlives-its-block",
        "            declared.is_over = True\n",
        "",
        source="vllm #43314",
        why="Pairs that were prepared without adapters leave them out of the next capture, too.",
    ),
    _steps(
        "pairs-known-from-their-capture",
        "    if known is not None and not known.is_declared and is_capturing(device):\n",
        "    if known is None and is_capturing(device):\n",
        source="vllm #43314",
        why="Pairs that a graph prepares are taken to be the base rows of its capture.",
    ),
    _metadata(
        "adapters-accepted-in-spite-of-the-declaration",
        "        if may_have and self._declared is not None:\n",
        "        if may_have and self._declared is None and self.num_rows < 0:\n",
        source="own",
        why="Rows with adapters are prepared for what was declared to have none.",
    ),
    _layer(
        "experts-without-adapters-not-computed",
        "        _launch(layer, pairs, *adapters, form=plan, adds=runs_adapters(step, x.device))\n",
        "        if runs_adapters(step, x.device):\n"
        "            _launch(layer, pairs, *adapters, form=plan, adds=True)\n",
        source="own",
        why="The early exit of a batch of base rows takes the base product with it.",
    ),
    _delta(
        "sides-lost-without-adapters",
        "        return fork_join(device, base, *beside, parallel=form.is_dual)\n",
        "        return base()\n",
        source="own",
        why="The early exit of a batch of base rows takes a second base product with it.",
    ),
    _dummy(
        "dummy-adapters-left-in-their-slots",
        "                layer.reset(slot)\n",
        "                layer.scales[slot].zero_()\n",
        source="vllm #35536",
        why="Free slots keep the ranks and factors of the dummy run.",
    ),
    _dummy(
        "dummy-adapters-replace-residents",
        "if not taken]\n",
        "if taken is not None]\n",
        source="own",
        why="A capture empties the slots of the adapters that are being served.",
    ),
    _dummy(
        "free-slots-of-the-first-layer",
        ".any(dim=0)\n",
        "[0]\n",
        source="sglang #29874",
        why="An adapter that does not target the first layer loses its other layers to a capture.",
    ),
    _runner(
        "padded-step-in-tiles-of-its-live-rows",
        "        batch.expect(key.num_tokens, num_live, may_have=has_adapters)\n",
        "        batch.expect(num_live, num_live, may_have=has_adapters)\n",
        source="vllm #42120",
        why="The host takes a step of 136 rows, 120 of them live, for one with other tiles.",
    ),
    _runner(
        "tables-of-a-mapping-that-was-copied",
        "        self._buffers.batch.install(self._inputs.token_slots, key.num_tokens)\n",
        "        slots = self._inputs.token_slots.clone()\n"
        "        self._buffers.batch.install(slots, key.num_tokens)\n",
        source="vllm #42120",
        why="A graph writes the tables of a copy of the mapping, which no later step fills.",
    ),
    _runner(
        "padded-rows-returned",
        "        return self._graphs[key].replay()[:num_live]\n",
        "        return self._graphs[key].replay()\n",
        source="own",
        why="The outputs of padded rows are handed out as if they were of requests.",
    ),
    _runner(
        "moved-buffers-not-noticed",
        "        self._graphs, self._unchecked = graphs, set(graphs)\n",
        "        self._graphs, self._unchecked = graphs, set()\n",
        source="vllm #53888",
        why="Weights move after the capture, and the graphs go on reading the old ones.",
    ),
    _inputs(
        "tail-of-the-inputs-not-reset",
        "            if live < self._live:\n",
        "            if live < self._live and not live:\n",
        source="sglang #29468",
        why="Padded rows keep tokens, positions and slots of a larger step before.",
    ),
    _inputs(
        "positions-of-the-step-before",
        "            part[:live] = _bits(given[name])\n",
        '            if live != self._live or name in ("input_ids", TOKEN_SLOTS):\n'
        "                part[:live] = _bits(given[name])\n",
        source="own",
        why="Positions are written only when a batch gets another size.",
    ),
    _staging(
        "inputs-copied-from-a-host-buffer-in-use",
        "        if self._used and self._used[0].copied.query():\n",
        "        if self._used:\n",
        source="vllm #36013",
        why="The inputs of the next step are written over those that are still to be copied.",
    ),
    _graphs(
        "every-graph-has-a-pool",
        "pool=self._handle,",
        "pool=self._module.graph_pool_handle(),",
        source="own",
        why="The memory of the graphs adds up.",
    ),
    _graphs(
        "collector-runs-during-a-capture",
        "    gc.disable()\n",
        "",
        source="own",
        why="The collector destroys an earlier graph, which breaks the capture.",
    ),
    _buffers(
        "one-scratch-for-two-dtypes",
        "layer.cut.intermediate.size, str(layer.dtype))\n",
        'layer.cut.intermediate.size, "")\n',
        source="sglang #21647",
        why="Layers of different sizes share a scratch that is made for the first of them.",
    ),
    _buffers(
        "reservation-forgets-a-buffer",
        "[*pairs.buffers, pairs.step]\n",
        "[*pairs.buffers[:-1], pairs.step]\n",
        source="sglang #21647",
        why="The cache is sized without the scratch memory of the alignment.",
    ),
    _buffers(
        "reserved-for-tokens-not-pairs",
        '        sizes = {"max_tokens": self.max_tokens, "top_k": top_k}\n',
        '        sizes = {"max_tokens": self.max_tokens, "top_k": 1}\n',
        source="sglang #21647",
        why="The buffers of the experts are counted in tokens, of which each has several pairs.",
    ),
    _buffers(
        "branches-not-reserved",
        "max_tokens=max_tokens, branches=branches)",
        "max_tokens=max_tokens, branches=1)",
        source="sglang #21647",
        why="Layers that run beside each other have one workspace.",
    ),
)
