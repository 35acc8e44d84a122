"""Faults that show only where a captured step is replayed: what was left out, frozen or moved."""

from __future__ import annotations

from loragate.faults.corpus.points import planting
from loragate.faults.model import Group

_dense = planting("lorakernels.dense.ops", Group.HOST)
_moe = planting("lorakernels.moe.delta.ops", Group.MOE_HOST)
_dense_launch = planting("lorakernels.dense.launch", Group.HOST)
_linear = planting("lorakernels.dense.linear", Group.HOST)
_metadata = planting("lorakernels.batch.metadata", Group.METADATA)
_weights = planting("lorakernels.common.stacked_weights", Group.WEIGHTS)
_gdn = planting("lorakernels.gdn.ops", Group.DELTA_NET)
_layer = planting("lorakernels.layers.linear", Group.LAYER)
_experts = planting("lorakernels.layers.moe", Group.MOE_LAYER)
_moe_launch = planting("lorakernels.moe.delta.launch", Group.MOE_HOST)
_align = planting("lorakernels.moe.align.ops", Group.ALIGN)
_pairs = planting("lorakernels.moe.align.metadata", Group.ALIGN)
_layer_launch = planting("lorakernels.moe.layer.launch", Group.MOE_LAYER)

_ROWS = "        self._set_rows(num_rows)\n"
_FORM = "    plan = GDNForm(form) if form else _plan(delta, products)\n"
_LOAD = "        self.reset(slot)\n        start = 0\n"
_LOAD_B = "                self.b[slot, ..., start : start + width, : part.rank].copy_(b)\n"
_SORT = "        self._check(topk_ids, batch, expert_map)\n"

FAULTS = (
    _dense(
        "delta-left-out-of-a-capture-of-base-rows",
        "from lorakernels.batch.steps import runs_adapters\n",
        "from lorakernels.batch.steps import base_rows\n"
        "runs_adapters = lambda tensor, device: base_rows(tensor) is None\n",
        source="vllm #43139",
        why="A graph that is captured while no row has an adapter never adds a delta.",
        only=True,
    ),
    _moe(
        "delta-of-experts-left-out-while-no-slot-is-loaded",
        "    if num_pairs == 0 or not runs_adapters(step, x.device):\n",
        "    ranks = SlotTensors(*slots.tensors).ranks\n"
        "    is_empty = not any(map(any, ranks.tolist()))\n"
        "    if num_pairs == 0 or not runs_adapters(step, x.device) or is_empty:\n",
        source="vllm #35536",
        why="A graph that is captured before an adapter is loaded never adds a delta of experts.",
        only=True,
    ),
    _dense(
        "delta-left-out-while-no-slot-is-loaded",
        "    if x.shape[0] == 0 or not runs_adapters(tile_rows, x.device):\n",
        "    is_empty = not any(map(any, ranks.tolist()))\n"
        "    if x.shape[0] == 0 or not runs_adapters(tile_rows, x.device) or is_empty:\n",
        source="vllm #35536",
        why="A graph that is captured before an adapter is loaded never adds a delta.",
    ),
    _weights(
        "scales-replaced-by-an-eviction",
        "        self.scales[slot].zero_()\n",
        "        self.scales = self.scales.clone()\n        self.scales[slot].zero_()\n",
        source="own",
        why="An eviction replaces the tensor of the scales, and graphs keep the old one.",
    ),
    _dense_launch(
        "grid-of-the-shrink-from-the-mapping",
        "    grid = (tile_programs(shape, capacity), plan.splits, -(-total // plan.block_n))\n",
        "    grid = (tiles.num_tiles.tolist()[0], plan.splits, -(-total // plan.block_n))\n",
        source="sglang #28371",
        why="A graph has as many programs as the mapping had tiles when it was captured.",
    ),
    _linear(
        "ranks-of-the-capture",
        "    slots = SlotTensors(a, b, ranks, scales)\n",
        "    now = torch.tensor(ranks.tolist(), dtype=ranks.dtype, device=ranks.device)\n"
        "    slots = SlotTensors(a, b, now, scales)\n",
        source="lorax #634",
        why="The ranks go through the host, and a graph has none of the adapters loaded later.",
    ),
    _metadata(
        "rows-of-experts-for-each-step",
        _ROWS,
        f"        self.token_slots = torch.full_like(self.token_slots, -1)\n{_ROWS}",
        source="vllm #34119",
        why="Each step gets a new mapping, and the captured alignment of experts reads the first.",
    ),
    _metadata(
        "slots-of-tiles-in-turn",
        _ROWS,
        "        spare = getattr(self, 'spare', torch.full_like(self.tile_slots, -1))\n"
        f"        self.spare, self.tile_slots = self.tile_slots, spare\n{_ROWS}",
        source="own",
        why="Two tables are used in turn, and a captured graph reads one of them at every step.",
    ),
    _weights(
        "a-replaced-by-a-load",
        _LOAD,
        f"        self.a = self.a.clone()\n{_LOAD}",
        source="sglang #7844",
        why="A load writes a copy of A, beside the step that runs, and graphs keep the old A.",
    ),
    _weights(
        "b-replaced-by-a-load",
        _LOAD_B,
        f"                self.b = self.b.clone()\n{_LOAD_B}",
        source="sglang #7844",
        why="A load writes a copy of B, beside the step that runs, and graphs keep the old B.",
    ),
    _layer(
        "slots-copied-by-an-unload",
        "        self.slots.reset(slot)\n",
        "        from copy import deepcopy\n\n"
        "        self.slots = deepcopy(self.slots)\n"
        "        self.slots.reset(slot)\n",
        source="sglang #29874",
        why="An unload replaces the slots of a layer, and graphs serve what was unloaded.",
    ),
    _experts(
        "slots-of-experts-copied-by-an-unload",
        "        self.w2_slots.reset(slot)\n",
        "        from copy import deepcopy\n\n"
        "        self.w2_slots = deepcopy(self.w2_slots)\n"
        "        self.w2_slots.reset(slot)\n",
        source="sglang #29874",
        why="An unload replaces the slots of the second product, and graphs keep the old ones.",
    ),
    _gdn(
        "gated-delta-net-captured-as-its-base",
        _FORM,
        "    from lorakernels.batch.steps import base_rows\n\n"
        "    if base_rows(tile_rows) is not None:\n"
        "        return torch.cat([product(x) for product in products], dim=1)\n"
        f"{_FORM}",
        source="vllm #43139",
        why="A capture while no row has an adapter contains the base products alone.",
    ),
    _align(
        "alignment-left-out-of-a-capture-of-base-rows",
        "    routes = topk_ids, token_slots, expert_map\n",
        "    from lorakernels.batch.steps import base_rows\n"
        "    if base_rows(batch_rows) is not None and not pairs.with_base:\n"
        "        return\n"
        "    routes = topk_ids, token_slots, expert_map\n",
        source="vllm #43314",
        why="No pair is sorted while no row has an adapter, nor by a graph that is captured then.",
    ),
    _align(
        "routes-of-the-capture",
        "    _check_routes(topk_ids, expert_map)\n",
        "    _check_routes(topk_ids, expert_map)\n"
        "    topk_ids = torch.tensor(topk_ids.tolist(), dtype=torch.int32, device=step.device)\n",
        source="own",
        why="The routes go through the host, and a graph aligns those of its capture.",
    ),
    _pairs(
        "pairs-sorted-once-for-the-same-routes",
        _SORT,
        f"{_SORT}"
        "        if topk_ids is getattr(self, 'sorted_ids', None):\n"
        "            return\n"
        "        self.sorted_ids = topk_ids\n",
        source="own",
        why="Layers of one step share an alignment, and a capture takes that of its warm-up.",
    ),
    _moe_launch(
        "grid-of-pairs-up-to-the-last-adapter",
        "    start(moe_small_batch_kernel, (shape.num_pairs, blocks))(\n",
        "    slots_now = delta.tables.pair_slots.tolist()[: shape.num_pairs]\n"
        "    live = max((i + 1 for i, slot in enumerate(slots_now) if slot >= 0), default=1)\n"
        "    start(moe_small_batch_kernel, (live, blocks))(\n",
        source="vllm #32277",
        why="A step has programs for the pairs that had an adapter when it was prepared.",
    ),
    _layer_launch(
        "grid-of-a-layer-from-its-routes",
        "    moe_gemm_kernel[(-(-width // plan.block_n) * pairs.base_tile_programs,)](\n",
        "    tiles_now = max(1, pairs.tables.num_base_tiles.tolist()[0])\n"
        "    moe_gemm_kernel[(-(-width // plan.block_n) * tiles_now,)](\n",
        source="vllm #32277",
        why="A graph has programs for as many experts as were chosen when it was captured.",
    ),
)
