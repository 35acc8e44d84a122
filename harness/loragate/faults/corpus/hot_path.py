"""Faults of what the host does in a step that a server repeats, and of what it captures."""

from __future__ import annotations

from loragate.faults.corpus.points import planting
from loragate.faults.model import Group

_ops = planting("lorakernels.dense.ops", Group.HOST)
_linear = planting("lorakernels.dense.linear", Group.HOST)
_metadata = planting("lorakernels.batch.metadata", Group.METADATA)
_prepare = planting("lorakernels.batch.kernels", Group.METADATA)
_weights = planting("lorakernels.common.stacked_weights", Group.WEIGHTS)
_align = planting("lorakernels.moe.align.metadata", Group.ALIGN)
_moe_ops = planting("lorakernels.moe.delta.ops", Group.MOE_HOST)
_layer_ops = planting("lorakernels.moe.layer.ops", Group.MOE_LAYER)

_VIEW_OF_EXPERTS = "    return shrunk[:size].view(wanted)\n"
_FRESH_OF_EXPERTS = "    return torch.empty_like(shrunk[:size]).view(wanted)\n"
_ROWS = "        self._set_rows(num_rows)\n"

FAULTS = (
    _ops(
        "shrink-output-for-each-call",
        "*tables, buffer_of_branch(shrunk), out\n",
        "*tables, torch.empty_like(buffer_of_branch(shrunk)), out\n",
        source="sglang #21647",
        why="Each call allocates the buffer between shrink and expand.",
        only=True,
    ),
    _ops(
        "tiles-asked-for-on-the-host",
        "    tables = tile_slots, tile_rows, num_tiles\n",
        "    if not num_tiles.item():\n"
        "        return\n"
        "    tables = tile_slots, tile_rows, num_tiles\n",
        source="own",
        why="A batch without adapters is recognised by reading the device.",
    ),
    _metadata(
        "tables-for-each-step",
        _ROWS,
        "        self.tile_rows = torch.full_like(self.tile_rows, -1)\n"
        f"        self._step = step_of(self.tile_rows)\n{_ROWS}",
        source="own",
        why="Each step gets a new table of rows, and a captured graph reads the first one.",
    ),
    _metadata(
        "counts-of-tiles-in-turn",
        _ROWS,
        "        spare = getattr(self, 'spare', torch.zeros_like(self.num_tiles))\n"
        f"        self.spare, self.num_tiles = self.num_tiles, spare\n{_ROWS}",
        source="own",
        why="Two buffers are used in turn, and a captured graph reads one of them at every step.",
    ),
    _prepare(
        "live-rows-compiled-in",
        "    num_live,\n    max_tokens,\n",
        "    num_live: tl.constexpr,\n    max_tokens,\n",
        source="triton #8273",
        why="The metadata kernel is compiled for each number of live rows.",
    ),
    _linear(
        "adapters-left-out-of-a-capture-of-base-rows",
        "from lorakernels.batch.steps import runs_adapters\n",
        "from lorakernels.batch.steps import base_rows\n"
        "runs_adapters = lambda tensor, device: base_rows(tensor) is None\n",
        source="vllm #43139",
        why="A graph that is captured while no row has an adapter serves the base model for ever.",
        only=True,
    ),
    _weights(
        "ranks-replaced-by-an-eviction",
        "        self.ranks[slot].zero_()\n",
        "        self.ranks = self.ranks.clone()\n        self.ranks[slot].zero_()\n",
        source="sglang #7844",
        why="The ranks move when a slot is emptied, and a captured graph keeps the old ones.",
    ),
    _linear(
        "output-copied-behind-the-expand",
        "    delta.expand(out, pdl=pdl, behind_base=form is not LinearForm.SINGLE)\n"
        "    return out\n",
        "    delta.expand(out, pdl=pdl, behind_base=form is not LinearForm.SINGLE)\n"
        "    return out.clone()\n",
        source="own",
        why="A copy of the whole output, as functionalisation makes one.",
    ),
    _moe_ops(
        "shrink-output-of-experts-for-each-call",
        _VIEW_OF_EXPERTS,
        _FRESH_OF_EXPERTS,
        source="sglang #21647",
        why="Each call allocates the buffer between shrink and expand.",
        only=True,
    ),
    _moe_ops(
        "tiles-of-experts-asked-for-on-the-host",
        "    if num_pairs == 0 or not runs_adapters(step, x.device):\n",
        "    if num_pairs == 0 or not pairs.tables.num_tiles.item():\n",
        source="own",
        why="A batch without adapters is recognised by reading the device.",
    ),
    _align(
        "counters-for-each-layer",
        "        return [*tables, self._scratch]\n",
        "        return [*tables, torch.empty_like(self._scratch)]\n",
        source="sglang #21647",
        why="Each alignment allocates its scratch memory.",
    ),
    _align(
        "pairs-sorted-into-new-tables",
        "        self._check(topk_ids, batch, expert_map)\n        align_pairs(",
        "        self._check(topk_ids, batch, expert_map)\n"
        "        self.tile_pairs = torch.full_like(self.tile_pairs, -1)\n"
        "        align_pairs(",
        source="own",
        why="Each alignment sorts into a new table, and lets go of the one before.",
    ),
    _layer_ops(
        "activations-for-each-layer",
        "        act=buffers.act,\n",
        "        act=torch.empty_like(buffers.act),\n",
        source="sglang #21647",
        why="Each layer allocates what lies between its two products.",
    ),
)
