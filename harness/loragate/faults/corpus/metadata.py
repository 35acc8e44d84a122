"""Faults of the mapping from rows to slots, which every step prepares, and of its padding."""

from __future__ import annotations

from loragate.faults.corpus.points import planting
from loragate.faults.model import Group

_plant = planting("lorakernels.batch.metadata", Group.METADATA)
_kernel = planting("lorakernels.batch.kernels", Group.METADATA)

FAULTS = (
    _plant(
        "stale-map-on-all-base-step",
        "        block = 1024 if self.max_tokens <= 1024 else 4096\n",
        "        if bool((token_slots < 0).all()):\n"
        "            return\n"
        "        block = 1024 if self.max_tokens <= 1024 else 4096\n",
        source="vllm #42120",
        why="A step of base rows only returns early and leaves the tables of the step before.",
        # all other mappings are installed as they should be
    ),
    _plant(
        "padded-tail-maps-to-slot-0",
        "        if token_slots.device != self.token_slots.device:\n",
        "        if num_rows is not None:\n"
        "            token_slots = torch.nn.functional.pad(token_slots, (0, num_rows - num_live))\n"
        "            num_live = num_rows\n"
        "        if token_slots.device != self.token_slots.device:\n",
        source="sglang #29468",
        why="Rows of padding get the adapter in slot 0 instead of none.",
    ),
    _plant(
        "mapping-known-by-its-sum",
        "        block = 1024 if self.max_tokens <= 1024 else 4096\n",
        "        now = num_live, int(token_slots.sum())\n"
        "        known, self._known = vars(self).get('_known'), now\n"
        "        if known == now:\n"
        "            return\n"
        "        block = 1024 if self.max_tokens <= 1024 else 4096\n",
        source="own",
        why="A step of as many rows, whose slots add up to the same number, keeps the tables.",
        only=True,
    ),
    _kernel(
        "token-map-tail-stays-stale",
        "tl.store(token_slots_ptr + token, tl.maximum(slots, -1), mask=token < max_tokens)",
        "tl.store(token_slots_ptr + token, tl.maximum(slots, -1), mask=token < num_live)",
        source="sglang #29468",
        why="The mapping after the live rows keeps the slots of an earlier, larger step.",
    ),
    _kernel(
        "tile-tail-reset-skipped",
        "    tl.store(own_rows_ptr + count + lanes, nothing, "
        "mask=count + lanes < own_tiles * HEIGHT)\n",
        "",
        source="sglang #28371",
        why="A tile that is not full keeps rows of an earlier step after its own.",
    ),
    _kernel(
        "tile-tables-tail-stays-stale",
        "    for start in range(num_tiles * HEIGHT + slot * BLOCK, size_tile_rows, step):\n",
        "    for start in range(num_tiles * HEIGHT + slot * BLOCK, num_tiles, step):\n",
        source="sglang #28371",
        why="Rows of tiles that are not needed any more stay in the table.",
    ),
    _kernel(
        "last-slot-not-counted",
        "mask=(slots >= 0) & (slots < max_slots))",
        "mask=(slots >= 0) & (slots < max_slots - 1))",
        source="vllm #32277",
        why="The loop over adapters ends one step early: the last one gets no delta.",
    ),
    _kernel(
        "last-partial-tile-dropped",
        "tile_counts = (counts + HEIGHT - 1) // HEIGHT",
        "tile_counts = counts // HEIGHT",
        source="vllm #27311",
        why="The number of tiles is rounded down: rows of a tile that is not full get no delta.",
    ),
    _kernel(
        "base-rows-alias-last-slot",
        "        mine = slots == slot\n",
        "        mine = (slots == slot) | ((slots < 0) & (slot == max_slots - 1) & "
        "(start + lanes < num_live))\n",
        source="vllm tests/lora/test_punica_ops.py",
        why="-1 is taken as an index from the end, so base rows get the last adapter.",
    ),
    _kernel(
        "slot-taken-for-one-run-of-rows",
        "        tl.store(own_rows_ptr + position, start + lanes, mask=mine)\n",
        "        row = start + lanes\n"
        "        before = tl.load(new_slots_ptr + row - 1, mask=mine & (row > 0), other=-1)\n"
        "        has_run = tl.max((before == slot).to(tl.int32), axis=0) > 0\n"
        "        first = tl.min(tl.where(mine, row, 1 << 30), axis=0)\n"
        "        row = tl.where(has_run, first + position - placed, row)\n"
        "        tl.store(own_rows_ptr + position, row, mask=mine)\n",
        source="own",
        why="Rows of an adapter, two of which are neighbours, are assumed to be consecutive.",
        only=True,
    ),
    _kernel(
        "second-block-of-rows-overwrites-first",
        "        placed += tl.sum(mine.to(tl.int32))\n",
        "        placed = tl.sum(mine.to(tl.int32))\n",
        source="own",
        why="The position in a long batch is counted from the last block of rows only.",
    ),
    _plant(
        "tables-sized-for-full-tiles",
        "return num_rows // height + min(num_slots, num_rows)",
        "return num_rows // height + 1",
        source="vllm #27311",
        why="Host and device round differently: the tables are too small for a ragged batch.",
    ),
    _plant(
        "tile-height-frozen-at-first-step",
        "            HEIGHT=self.height_of(self.num_rows),\n",
        "            HEIGHT=self.__dict__.setdefault(\n"
        '                "height", self.height_of(self.num_rows)\n'
        "            ),\n",
        source="vllm #34119",
        why="A scalar of the first batch becomes a constant for all that follow.",
    ),
    _plant(
        "tables-uninitialised",
        "keep_address(torch.full((size,), -1, dtype=torch.int32, device=device))",
        "keep_address(torch.empty(size, dtype=torch.int32, device=device))",
        source="vllm #43139",
        why="A dummy run reads the tables before any mapping was installed.",
    ),
    _plant(
        "batch-larger-than-metadata",
        "        if num_rows > self.max_tokens:\n",
        "        if num_rows > self.max_tokens + self.max_slots:\n",
        source="vllm #15308",
        why="A captured size above the number of rows that the tables hold is accepted.",
    ),
    _plant(
        "slot-id-unchecked",
        "        if low < -1 or high >= self.max_slots:\n",
        "        if low < -1 or high > self.max_slots:\n",
        source="own",
        why="A row may name the slot after the last one.",
    ),
)
