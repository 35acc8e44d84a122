"""Faults of kernels that are launched dependently: they use memory before they wait, or end without
a wait. No batch shows them for certain, on a GPU neither."""

from __future__ import annotations

from loragate.faults.corpus.points import planting
from loragate.faults.model import Group

_expand = planting("lorakernels.dense.kernels", Group.EXPAND)
_two_launch = planting("lorakernels.moe.delta.kernels.two_launch", Group.MOE_TWO_KERNEL)

_LOAD = "            h = load_shrunk(h_ptrs, live_h, stride_shrunk_split, SPLITS) * early"
_WAIT = "            if PDL:\n                gdc_wait()\n"

FAULTS = (
    _expand(
        "columns-stream-ahead-of-the-wait",
        f"{_WAIT}{_LOAD}\n            h = h.to(b_ptr",
        f"{_LOAD}\n{_WAIT}            h = h.to(b_ptr",
        source="own",
        why="Where columns stream, the shrink output is loaded while the shrink still writes it.",
    ),
    _expand(
        "expand-without-tiles-does-not-wait",
        "    # also without any tile: later kernels rely on the shrink being complete\n"
        "    if PDL:\n        gdc_wait()\n",
        "",
        source="own",
        why="Behind a batch of base rows the next kernel starts while the shrink still runs.",
    ),
    _expand(
        "stored-delta-loaded-ahead-of-the-wait",
        "        if PDL:\n            gdc_wait()\n        stored = tl.load(stored_ptrs, mask=live, "
        "other=0.0)\n",
        "        stored = tl.load(stored_ptrs, mask=live, other=0.0)\n"
        "        if PDL:\n            gdc_wait()\n",
        source="own",
        why="A stored delta is loaded while the expand may still write it.",
    ),
    _two_launch(
        "shrink-output-of-experts-loaded-ahead-of-the-wait",
        f"{_WAIT}{_LOAD}[:, None]\n            acc",
        f"{_LOAD}[:, None]\n{_WAIT}            acc",
        source="own",
        why="The expand loads the shrink output while the shrink still writes it.",
    ),
)
