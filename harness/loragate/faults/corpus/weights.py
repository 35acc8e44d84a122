"""Faults of the stacked slots of one layer: loading an adapter, and resetting its predecessor."""

from __future__ import annotations

from loragate.faults.corpus.points import planting
from loragate.faults.model import Group

_plant = planting("lorakernels.common.stacked_weights", Group.WEIGHTS)
_slots = planting("lorakernels.dense.weights", Group.WEIGHTS)
_stacks = planting("lorakernels.dense.stacks", Group.WEIGHTS)

FAULTS = (
    _plant(
        "slot-not-reset",
        "        self.reset(slot)\n        start = 0\n",
        "        start = 0\n",
        source="sglang #8103",
        why="A slice that the new adapter does not have keeps the weights of the one before.",
    ),
    _plant(
        "reset-stops-after-first-slice",
        "        self.ranks[slot].zero_()\n"
        "        self.scales[slot].zero_()\n"
        "        self.a[slot].zero_()\n"
        "        self.b[slot].zero_()\n",
        "        self.ranks[slot, :1].zero_()\n"
        "        self.scales[slot, :1].zero_()\n"
        "        self.a[slot, :1].zero_()\n"
        "        self.b[slot, : self.slice_widths[0]].zero_()\n",
        source="sglang #8103",
        why="An evicted adapter lives on in all slices of its slot but the first.",
    ),
    _plant(
        "adapter-takes-rank-of-buffers",
        "self.ranks[slot, index].fill_(part.rank)",
        "self.ranks[slot, index].fill_(self.rank)",
        source="vllm #31994",
        why="An adapter smaller than its slot is contracted over the rank of the buffers.",
    ),
    _plant(
        "scale-folded-in-and-applied",
        "self.b[slot, ..., start : start + width, : part.rank].copy_(b)",
        "self.b[slot, ..., start : start + width, : part.rank].copy_(b * part.scale)",
        source="SkyRL #2250",
        why="The scale is folded into B at loading time, and applied again by the kernel.",
    ),
    _plant(
        "scale-folded-into-durable-copy",
        "                self.b[slot, ..., start : start + width, : part.rank].copy_(b)\n",
        "                b.mul_(part.scale)\n"
        "                self.b[slot, ..., start : start + width, : part.rank].copy_(b)\n",
        source="unsloth-zoo #951",
        why="Loading an adapter scales the tensors that it was loaded from.",
    ),
    _plant(
        "gate-loaded-twice-up-never",
        "self._write_a(slot, index, a)",
        "self._write_a(slot, index, (factors[0] or part).a)",
        source="unsloth-zoo #941",
        why="Both halves of gate_up get the A of the gate; the shapes are the same.",
    ),
    _plant(
        "absent-slice-shifts-the-rest",
        "index].fill_(float(part.scale))\n            start += width\n",
        "index].fill_(float(part.scale))\n                start += width\n",
        source="vllm #36309",
        why="After a slice that the adapter does not have, B lands in the columns before its own.",
    ),
    _plant(
        "scale-rounded-to-integer",
        "self.scales[slot, index].fill_(float(part.scale))",
        "self.scales[slot, index].fill_(round(part.scale))",
        source="peft #2733",
        why="A scale that is not an integer is rounded to one.",
    ),
    _plant(
        "slot-emptied-before-adapter-is-checked",
        "        self._check_slot(slot)\n        if len(factors) != self.num_slices:\n",
        "        self.reset(slot)\n        if len(factors) != self.num_slices:\n",
        source="own",
        why="An adapter that is refused has already replaced the one before.",
    ),
    _plant(
        "negative-slot-accepted",
        "        if not 0 <= slot < self.num_slots:\n",
        "        if not slot < self.num_slots:\n",
        source="vllm tests/lora/test_punica_ops.py",
        why="Slot -1 means the last slot to Python.",
        only=True,
    ),
    _stacks(
        "stacks-of-the-server-left-to-it",
        "    return AdoptedStacks(weights, views_a, views_b)\n",
        "    return AdoptedStacks(weights, tuple(a), tuple(b))\n",
        source="own",
        why="A server goes on loading adapters into stacks that no kernel reads.",
    ),
    _stacks(
        "adopted-stacks-begin-empty",
        "    ranks = torch.full((slots, slices), rank, dtype=torch.int32, device=device)\n",
        "    ranks = torch.zeros(slots, slices, dtype=torch.int32, device=device)\n",
        source="own",
        why="Adapters that were loaded before a server's stacks are adopted are not served.",
    ),
    _slots(
        "adopted-tensors-copied",
        "        tensors = SlotTensors(a, b, ranks, scales)\n",
        "        tensors = SlotTensors(a.clone(), b.clone(), ranks.clone(), scales.clone())\n",
        source="own",
        why="What a server writes to its own tensors is not seen.",
    ),
    _slots(
        "adopted-slots-emptied",
        "        StackedWeights.__init__(weights, tensors, slice_widths)\n",
        "        StackedWeights.__init__(weights, tensors, slice_widths)\n"
        "        for slot in range(weights.num_slots):\n"
        "            weights.reset(slot)\n",
        source="own",
        why="Adapters that a server's tensors hold are lost when they are adopted.",
    ),
    _plant(
        "dead-ranks-of-padded-factors-kept",
        "[p.masked_fill(dead, 0) for p, dead in zip(parts, is_dead, strict=True)]",
        "[p for p, dead in zip(parts, is_dead, strict=True)]",
        source="vllm #31994",
        why="What lies behind the rank of an adapter is read together with its last ranks.",
    ),
    _plant(
        "first-scale-on-the-device-for-all-slices",
        "        self.scales[slot].copy_(scales)\n",
        "        self.scales[slot].copy_(scales[:1])\n",
        source="own",
        why="All slices get the scale of the first one.",
    ),
    _plant(
        "rank-on-the-device-believed",
        "        live = ranks.clamp(0, most)\n",
        "        live = ranks.clamp(min=0)\n",
        source="own",
        why="A rank beyond the buffers makes kernels read the slices behind.",
    ),
    _plant(
        "rank-of-padded-factors-taken-for-live",
        "        self.ranks[slot].copy_(live)\n",
        "        self.ranks[slot].fill_(most)\n",
        source="vllm #31994",
        why="An adapter with its rank on the device is contracted over all ranks of its factors.",
    ),
    _plant(
        "padded-factors-loaded-over-the-ones-before",
        "        self.reset(slot)\n        self._write_a(slot, slice(None), a)\n",
        "        self._write_a(slot, slice(None), a)\n",
        source="sglang #8103",
        why="Behind padded factors that are smaller than the slot its last adapter stays.",
    ),
    _plant(
        "host-waits-for-the-ranks-of-an-adapter",
        "        live = ranks.clamp(0, most)\n",
        "        live = ranks.clamp(0, max(0, min(most, int(ranks.max()))))\n",
        source="own",
        why="Loading an adapter waits until the device has done all steps before.",
    ),
)
