"""Faults of packed layers and of their tensor-parallel cuts."""

from __future__ import annotations

from loragate.faults.corpus.points import planting
from loragate.faults.model import Group

_linear = planting("lorakernels.layers.linear", Group.LAYER)
_wrapped = planting("lorakernels.layers.wrapped", Group.LAYER)
_warm_up = planting("lorakernels.layers.warm_up", Group.LAYER)
_dense = planting("lorakernels.dense.linear", Group.LAYER)
_packing = planting("lorakernels.layers.packing", Group.LAYER)
_partition = planting("lorakernels.layers.partition", Group.LAYER)


FAULTS = (
    _packing(
        "packed-weight-cut-as-one",
        "    pieces = torch.split(tensor, [part.width for part in slices])\n"
        "    return torch.cat([take(p, s, dim=0) for p, s in zip(pieces, shards, strict=True)])",
        "    size = sum(shard.size for shard in shards)\n"
        "    first = sum(shard.start for shard in shards)\n"
        "    return tensor[first : first + size]",
        source="tensorrt-llm #8063",
        why="A packed weight is cut in the middle instead of slice by slice.",
    ),
    _packing(
        "every-rank-takes-first-part-of-a",
        "take(factors.a, cut.inputs, dim=1)",
        "factors.a[:, : cut.inputs.size]",
        source="sglang #24171",
        why="All ranks of a row-parallel layer shrink with the first rank's columns of A.",
    ),
    _packing(
        "every-rank-takes-first-part-of-b",
        "take(factors.b, cut.columns[index], dim=0)",
        "factors.b[: cut.columns[index].size]",
        source="sglang #24171",
        why="All ranks of a column-parallel layer expand with the first rank's rows of B.",
    ),
    _packing(
        "scale-folded-into-cached-adapter",
        'cast[f"b of {name}"], factors.scale)',
        'cast[f"b of {name}"].mul_(factors.scale), 1.0)',
        source="vllm #20873",
        why="An adapter that is activated a second time was changed by the first time.",
    ),
    _packing(
        "fused-slices-swapped",
        "zip(members, torch.split(factors.b, widths), strict=True)",
        "zip(reversed(members), torch.split(factors.b, widths[::-1]), strict=True)",
        source="unsloth-zoo #941",
        why="The rows of a fused B go to its slices in reverse order.",
    ),
    _packing(
        "fused-module-gets-one-slice",
        "            return tuple(names.index(member) for member in self.fused[module])\n",
        "            return tuple(names.index(member) for member in self.fused[module][:2])\n",
        source="sglang #30189",
        why="Of a fused projection only the first slices are served.",
    ),
    _packing(
        "bare-list-indexed-as-slices",
        "        if not isinstance(parts, Mapping):\n",
        "        if isinstance(parts, list):\n"
        "            parts = dict(enumerate(parts))\n"
        "        if not isinstance(parts, Mapping):\n",
        source="vllm #51409",
        why="A list without names is matched to slices by position.",
    ),
    _partition(
        "wrong-rank-passed",
        "    start = min(tp_rank * size, width)\n",
        "    start = min(tp_rank // 2 * size, width)\n",
        source="vllm #38021",
        why="Two ranks hold one part and another is held by none.",
    ),
    _partition(
        "stride-of-unpadded-size",
        "    size = padded // tp_size\n    start = min(tp_rank * size, width)\n",
        "    size = padded // tp_size\n    start = min(tp_rank * (width // tp_size), width)\n",
        source="vllm #42595",
        why="Where the base layer is padded, every rank but the first gets a neighbour's columns.",
    ),
    _partition(
        "replicated-layer-sized-by-rank",
        "    if parallel is Parallel.COLUMN:\n",
        "    if parallel is not Parallel.ROW:\n",
        source="sglang #29448",
        why="A layer that every rank holds as a whole is cut all the same.",
    ),
    _partition(
        "kv-heads-not-replicated",
        "    start = tp_rank // replicas(part, tp_size) * size\n",
        "    start = tp_rank % (part.width // size) * size\n",
        source="sglang #24420",
        why="With more ranks than heads, neighbouring ranks get different heads.",
    ),
    _partition(
        "bias-added-by-every-rank",
        "parallel is not Parallel.ROW or tp_rank == 0)",
        "parallel is not Parallel.ROW or tp_rank >= 0)",
        source="own",
        why="Each rank of a row-parallel layer adds the bias to its partial output.",
    ),
    _dense(
        "delta-on-a-copy",
        "    delta.expand(out, pdl=pdl,",
        "    delta.expand(out.clone(), pdl=pdl,",
        source="tgi #2180",
        why="The delta goes to a buffer that is never read; the base model is served.",
    ),
    _linear(
        "batch-taken-sequence-first",
        "        rows = x.reshape(-1, x.shape[-1])\n",
        "        rows = x.transpose(0, -2).reshape(-1, x.shape[-1])\n",
        source="own",
        why="Of an input of three dimensions the first two are exchanged.",
    ),
    _wrapped(
        "wrapped-delta-on-a-copy",
        "        dense_delta(rows, self.slots, metadata, workspace, out)\n",
        "        dense_delta(rows, self.slots, metadata, workspace, out.clone())\n",
        source="tgi #2180",
        why="What an existing linear returns stays as it is; the base model is served.",
    ),
    _wrapped(
        "wrapped-adapters-cut-for-the-first-rank",
        "            tp_rank=tp_rank,\n            padded_in_features=",
        "            tp_rank=0,\n            padded_in_features=",
        source="sglang #24171",
        why="Around an existing linear all ranks hold the first rank's part of an adapter.",
    ),
    _wrapped(
        "wrapped-base-copied",
        "        self.base, self.slots = base, slots\n",
        "        from copy import deepcopy\n\n"
        "        self.base, self.slots = deepcopy(base), slots\n",
        source="own",
        why="A layer around an existing linear keeps weights that are replaced later.",
    ),
    _wrapped(
        "wrapped-base-gets-the-input-as-it-is",
        "        out = self.base(rows)\n",
        "        out = self.base(x)\n        out = out.view(-1, out.shape[-1])\n",
        source="own",
        why="A kernel of the base that knows rows alone gets three dimensions.",
    ),
    _wrapped(
        "slots-of-other-widths-accepted",
        "        if (slots.slice_widths, slots.in_features) != (widths, self.cut.inputs.size):\n",
        "        if slots.in_features != self.cut.inputs.size:\n",
        source="own",
        why="Slots whose slices are not those of the layer are loaded across each other.",
    ),
    _warm_up(
        "warm-up-without-plans-of-the-expand",
        "plan_shrink(beside), plan_expand(whole), forms)",
        "plan_shrink(beside), forms)",
        source="own",
        why="Batches between two plans of the shrink compile an expand while serving.",
    ),
    _warm_up(
        "warm-up-of-the-first-geometry",
        "    for layer in layers:\n",
        "    for layer in layers[:1]:\n",
        source="own",
        why="All layers but the first one compile while serving.",
    ),
    _warm_up(
        "layers-of-one-width-taken-for-one-geometry",
        "    for layer in layers:\n",
        "    for layer in {len(layer.slots.slice_widths): layer for layer in layers}.values():\n",
        source="own",
        why="Layers with as many slices as another one compile while serving.",
    ),
)
