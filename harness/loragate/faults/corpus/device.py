"""Faults that show on a GPU only: programs that run at the same time, kernels that are recompiled.

The interpreter runs one program after the other, so it never shows a wrong order.
"""

from __future__ import annotations

from loragate.faults.corpus.points import planting
from loragate.faults.model import Group, Needs

_shrink = planting("lorakernels.dense.kernels", Group.SHRINK)
_expand = planting("lorakernels.dense.kernels", Group.EXPAND)
_host = planting("lorakernels.batch.metadata", Group.METADATA)
_upload = planting("lorakernels.runtime.device", Group.METADATA)
_weights = planting("lorakernels.common.stacked_weights", Group.WEIGHTS)
_metadata = planting("lorakernels.batch.kernels", Group.METADATA)

FAULTS = (
    _expand(
        "expand-does-not-wait",
        "                b = tl.load(b_ptrs, mask=live_n & live_r, other=0.0)\n"
        "                if PDL:\n"
        "                    gdc_wait()\n"
        "            h = ",
        "                b = tl.load(b_ptrs, mask=live_n & live_r, other=0.0)\n            h = ",
        source="vllm #31777",
        why="The expand reads the shrink output while the shrink still writes it.",
        needs=Needs.GPU,
    ),
    _shrink(
        "shrink-does-not-wait",
        "    if PDL:\n        gdc_wait()\n        if EARLY:\n",
        "    if PDL:\n        if EARLY:\n",
        source="vllm #31777",
        why="The shrink reads an input that the kernel before it has not written yet.",
        needs=Needs.GPU,
    ),
    _shrink(
        "expand-started-before-the-wait",
        "        gdc_wait()\n        if EARLY:\n            gdc_launch_dependents()\n",
        "        if EARLY:\n            gdc_launch_dependents()\n        gdc_wait()\n",
        source="vllm #31777",
        why="The expand may start, and fetch its output, before that has been written.",
        needs=Needs.GPU,
    ),
    _expand(
        "sum-rotates-with-the-tile",
        "            h = load_shrunk(h_ptrs, live_h, stride_shrunk_split, SPLITS) * early\n"
        "            acc = dot(",
        "            h = tl.zeros([BLOCK_M, BLOCK_R], dtype=tl.float32)\n"
        "            for p in range(SPLITS):\n"
        "                turn = (p + part) % SPLITS\n"
        "                split_ptrs = h_ptrs + tl.cast(stride_shrunk_split, tl.int64) * turn\n"
        "                h += tl.load(split_ptrs, mask=live_h, other=0.0)\n"
        "            h = h * early\n"
        "            acc = dot(",
        source="vllm #50278",
        why="Partial sums are added in an order that depends on where in the batch a row stands.",
        needs=Needs.GPU,
    ),
    _metadata(
        "batch-size-compiled-in",
        'do_not_specialize=["num_live", "max_tokens",',
        'do_not_specialize=["max_tokens",',
        source="triton #8273",
        why="The metadata kernel is recompiled for a batch size that is 1 or a multiple of 16.",
        needs=Needs.GPU,
    ),
    _metadata(
        "foreign-slot-counted",
        "        slots = tl.where(slots < max_slots, slots, -1)\n",
        "        slots = tl.where(slots <= max_slots, slots, -1)\n",
        source="vllm #49058",
        why="An id past the last slot is kept where the mapping exists only on the device.",
        needs=Needs.GPU,
    ),
    _upload(
        "pinned-buffer-reused",
        '    staged = torch.empty(host.shape, dtype=host.dtype, device="cpu", pin_memory=True)\n',
        "    staged = upload.__dict__.setdefault(\n"
        "        'pinned', torch.empty(1 << 16, dtype=torch.int32).pin_memory()\n"
        "    )[: host.shape[0]]\n",
        source="vllm #36013",
        why="The mapping of the next step is written over one that is still to be copied.",
        needs=Needs.GPU,
    ),
    _host(
        "prepare-reads-the-device",
        "        self._set_rows(num_rows)\n",
        "        self._set_rows(num_rows)\n        int(self.num_tiles)\n",
        source="own",
        why="Each step waits for the device to finish the one before.",
    ),
    _weights(
        "buffers-replaced-by-a-load",
        "        self.b[slot].zero_()\n",
        "        self.b = self.b.clone()\n        self.b[slot].zero_()\n",
        source="sglang #7844",
        why="A load moves B to another address, and a captured graph goes on reading the old one.",
    ),
)
