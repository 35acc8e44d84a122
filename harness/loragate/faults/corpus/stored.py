"""Faults of a delta that is stored on a second stream and added behind the base product."""

from __future__ import annotations

from loragate.faults.corpus.points import planting
from loragate.faults.model import Group

_linear = planting("lorakernels.dense.linear", Group.STREAMS)
_kernels = planting("lorakernels.dense.kernels", Group.EXPAND)
_shared = planting("lorakernels.common.jit", Group.EXPAND)
_forms = planting("lorakernels.dense.forms", Group.STREAMS)
_ops = planting("lorakernels.dense.ops", Group.STREAMS)

_FORK = "    out = fork_join(device, base, *beside, partial(delta.store, stored, pdl=pdl))\n"
_ADD = "    launch_add(stored, delta.shape, delta.tiles, out, pdl=pdl)\n"
_STORED = "stored = tl.load(stored_ptrs, mask=live, other=0.0)\n"

FAULTS = (
    _linear(
        "stored-delta-added-before-the-join",
        f"{_FORK}{_ADD}",
        """
    def main() -> Tensor:
        out = base()
        launch_add(stored, delta.shape, delta.tiles, out, pdl=pdl)
        return out

    out = fork_join(device, main, *beside, partial(delta.store, stored, pdl=pdl))
""",
        source="vllm #35721",
        why="The sum reads the delta while the other stream still writes it.",
    ),
    _linear(
        "stored-delta-over-its-own-shrink-output",
        "[shrunk:].view(size)",
        "[: math.prod(size)].view(size)",
        source="sglang #21647",
        why="Programs of the expand overwrite the ranks that others have not read yet.",
    ),
    _linear(
        "delta-stored-behind-the-base-product",
        _FORK,
        "    out = fork_join(device, base, *beside)\n    delta.store(stored, pdl=pdl)\n",
        source="vllm #34933",
        why="The form of two streams runs on one.",
    ),
    _linear(
        "stored-delta-in-memory-of-the-side",
        _FORK,
        "    made = []\n\n"
        "    def side() -> None:\n"
        "        made.append(torch.empty_like(stored))\n"
        "        delta.store(made[0], pdl=pdl)\n\n"
        "    out = fork_join(device, base, *beside, side)\n    stored = made.pop()\n",
        source="local-inference-lab #93",
        why="What the side allocated leaves it, and every step allocates it again.",
    ),
    _kernels(
        "delta-of-an-adapter-without-ranks-is-not-stored",
        "live_m = in_batch if STORE else in_batch & (rank > 0)",
        "live_m = in_batch & (rank > 0)",
        source="vllm #35721",
        why="The sum adds what an earlier step has left there.",
    ),
    _kernels(
        "stored-delta-rounded-before-the-sum",
        _STORED,
        "stored = tl.load(stored_ptrs, mask=live, other=0.0)\n"
        "        stored = stored.to(out_ptr.dtype.element_ty).to(tl.float32)\n",
        source="vllm #35721",
        why="The delta is rounded to the dtype of the output, and so is the sum.",
    ),
    _kernels(
        "stored-delta-of-one-round-of-programs",
        "        next_part = tl.minimum(part + tl.num_programs(1), last_part)\n"
        "        rows = tl.load(tile_rows_ptr + next_part * BLOCK_M + offs_m)\n"
        "        if PDL:\n            gdc_wait()\n        stored",
        "        next_part = tl.minimum(part + tl.num_programs(1), last_part)\n"
        "        rows = tl.load(tile_rows_ptr + next_part * BLOCK_M + offs_m) * 0 - 1\n"
        "        if PDL:\n            gdc_wait()\n        stored",
        source="own",
        why="Tiles beyond the programs of the grid get no delta.",
    ),
    _shared(
        "stored-delta-added-to-what-was-there",
        "    if STORE:\n        return tl.zeros(ptrs.shape, ptrs.dtype.element_ty)\n",
        "",
        source="vllm #35721",
        why="The delta of a step is added to that of the step before.",
    ),
    _forms(
        "delta-stored-whatever-its-size",
        "LinearForm.STORED if may_store(shape) else LinearForm.DUAL",
        "LinearForm.STORED",
        source="own",
        why="The workspace does not hold the delta of a wide layer.",
    ),
    _ops(
        "workspace-without-the-stored-delta",
        "largest_shrunk(shape, slots, max_tokens, copies) + largest_stored(shape, max_tokens)",
        "max(largest_shrunk(shape, slots, max_tokens, copies), largest_stored(shape, max_tokens))",
        source="sglang #21647",
        why="Shrink output and delta are in use at the same time.",
    ),
)
