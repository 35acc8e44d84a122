"""Faults of launches that are prepared once for all operands that are alike."""

from __future__ import annotations

from loragate.faults.corpus.points import planting
from loragate.faults.model import Group

_prepared = planting("lorakernels.runtime.prepared", Group.HOST)

_LAYOUT = "    return operand.shape, operand.stride(), operand.dtype, operand.device, is_aligned\n"
_KEY = "        key = plan, constants, tuning, tuple(map(_layout, operands))\n"

FAULTS = (
    _prepared(
        "fixed-tensors-have-the-layout-of-the-first",
        "        return tuple(map(_layout, self.tensors))\n",
        "        return tuple(map(_layout, self.tensors[:1]))\n",
        source="own",
        why="A layer whose B is wider than that of another one gets its launches.",
    ),
    _prepared(
        "layout-without-strides",
        _LAYOUT,
        "    return operand.shape, operand.dtype, operand.device, is_aligned\n",
        source="own",
        why="A step whose rows are further apart is read with the strides of another one.",
    ),
    _prepared(
        "layout-without-alignment",
        _LAYOUT,
        "    return operand.shape, operand.stride(), operand.dtype, operand.device\n",
        source="own",
        why="A kernel that was compiled for addresses that are multiples of 16 gets others.",
    ),
    _prepared(
        "layout-without-rows",
        _LAYOUT,
        "    strides = operand.stride()\n"
        "    return operand.shape[1:], strides, operand.dtype, operand.device, is_aligned\n",
        source="vllm #32277",
        why="A step with more rows is launched with the grid of the first one.",
    ),
    _prepared(
        "launches-kept-without-their-constants",
        _KEY,
        "        key = plan, tuning, tuple(map(_layout, operands))\n",
        source="own",
        why="A layer whose slices have other widths gets the launches of one of the same sizes.",
    ),
    _prepared(
        "launches-kept-for-any-plan",
        _KEY,
        "        key = constants, tuning, tuple(map(_layout, operands))\n",
        source="own",
        why="One operation is launched in place of another one whose operands are alike.",
    ),
    _prepared(
        "launches-kept-for-any-tuning",
        _KEY,
        "        key = plan, constants, tuple(map(_layout, operands))\n",
        source="own",
        why="Batch invariance that is switched on leaves the launches as they were.",
    ),
    _prepared(
        "scratch-of-the-first-step",
        "    def allocate(self) -> Tensor:\n"
        "        return torch.empty(self.shape, dtype=self.dtype, device=self.device)\n",
        "    def allocate(self) -> Tensor:\n"
        '        kept = globals().setdefault("_KEPT", {})\n'
        "        if self not in kept:\n"
        "            kept[self] = torch.empty(self.shape, dtype=self.dtype, device=self.device)\n"
        "        return kept[self]\n",
        source="sglang #28091",
        why="Operations of one size share what they allocate, whatever stream they are on.",
    ),
    _prepared(
        "views-of-operands-taken-for-scratch",
        "any(_shares_memory(each, tensor) for each in known) or not ",
        "not ",
        source="own",
        why="A part of an operand that begins behind it becomes memory that nobody has written.",
    ),
    _prepared(
        "views-begin-where-their-operand-does",
        "    return operand.data_ptr() == tensor.data_ptr() and operand.dtype == tensor.dtype\n",
        "    return operand.dtype == tensor.dtype\n",
        source="own",
        why="A part of an operand that begins behind it is read from the start of the operand.",
    ),
    _prepared(
        "plans-compute-for-their-first-step",
        "    with noted_launches() as launches, _NoWork():",
        "    with noted_launches() as launches:",
        source="own",
        why="What torch computes between two launches is left out from the second step on.",
    ),
    _prepared(
        "launches-made-while-they-are-noted",
        "    if is_noting():\n",
        "    if is_noting() and not operands:\n",
        source="own",
        why="A warm-up notes no launch, and launches on memory that holds anything.",
    ),
)
