"""Which row of a batch uses which slot, sorted and tiled on the device.

One launch without host synchronisation writes everything that the dense kernels read. All
buffers are persistent and every prepare() resets what lies past the live part, so a padded
row is always a base row and a replayed graph never reads an entry of an earlier step
(vllm #42120, sglang #29468).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from lorakernels.batch.kernels import prepare_kernel
from lorakernels.batch.steps import BaseRows, check_option, step_of
from lorakernels.common.sizes import power_of_2
from lorakernels.runtime.device import keep_address, on_device_of, upload
from lorakernels.runtime.options import batch_invariant
from lorakernels.runtime.tuning import DEFAULT, Tuning, tuning_of

# smallest height of a tile: the M of a tensor-core instruction
MIN_TILE_ROWS = 16
# all that `tile_height` gives, ascending
HEIGHTS = (MIN_TILE_ROWS, 32, 64, 128)


def tile_height(num_rows: int, tuning: Tuning = DEFAULT) -> int:
    """Rows of one adapter that one tile covers. Depends on the batch size alone, so that it
    is a constant of a captured graph."""
    num_rows = tuning.dense.planned_rows or num_rows
    if num_rows <= tuning.dense.rows_of_height_16:
        return 16
    if num_rows <= tuning.dense.rows_of_height_32:
        return 32
    return 64 if num_rows <= tuning.dense.rows_of_height_64 else 128


def max_tiles(num_rows: int, num_slots: int, height: int) -> int:
    """Most tiles a batch can need: each slot adds at most one that is not full."""
    return num_rows // height + min(num_slots, num_rows)


class BatchMetadata:
    """Device buffers, all int32:

    token_slots [max_tokens]: slot of each row, -1 for base rows, padding and unknown slots.
    tile_slots [max_tiles]: slot of each tile, ascending; -1 past the last.
    tile_rows [max_tiles * height]: the rows of each tile, ascending within a slot; -1 where a
        tile is not full and past the last.
    num_tiles [1].

    The entries of a tile follow from its number alone, so a kernel loads all of them at once.

    height: of the tiles of every step, one of HEIGHTS, for a server that knows the live rows of a
        step but not how far its graph pads them; without it the rows of a step decide. Operators
        refuse a step whose rows have tiles of another height. Raises ValueError.
    """

    def __init__(
        self,
        *,
        max_tokens: int,
        max_slots: int,
        device: torch.device | str,
        height: int | None = None,
    ) -> None:
        if max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1 (got {max_tokens})")
        if max_slots < 1:
            raise ValueError(f"max_slots must be at least 1 (got {max_slots})")
        if height not in (None, *HEIGHTS):
            raise ValueError(
                f"height must be {', '.join(map(str, HEIGHTS))} or None (got {height})"
            )
        self.max_tokens, self.max_slots = max_tokens, max_slots
        self.tuning, self._height = tuning_of(torch.device(device)), height

        def table(size: int) -> Tensor:
            return keep_address(torch.full((size,), -1, dtype=torch.int32, device=device))

        self.token_slots = table(max_tokens)
        self.tile_slots = table(max_tiles(max_tokens, max_slots, MIN_TILE_ROWS))
        tallest = self.height_of(max_tokens)
        self.tile_rows = table(max_tiles(max_tokens, max_slots, tallest) * tallest)
        self.num_tiles = keep_address(torch.zeros(1, dtype=torch.int32, device=device))
        # what the operators find by the table
        self._step = step_of(self.tile_rows)
        self._step.is_invariant, self._step.height = batch_invariant(), height
        self._declared: BaseRows | None = None
        self._set_rows(0)

    def height_of(self, num_rows: int) -> int:
        """Height of the tiles of a step of so many rows."""
        return self._height or tile_height(num_rows, self.tuning)

    @property
    def buffers(self) -> list[Tensor]:
        return [self.token_slots, self.tile_slots, self.tile_rows, self.num_tiles]

    def prepare(
        self, token_slots: Tensor, *, num_rows: int | None = None, uploaded: Tensor | None = None
    ) -> None:
        """Install the mapping of the next step.

        token_slots: int32 [live rows], on this device (no copy) or on the CPU (copied without
            a sync, and free to be overwritten at once). -1 is a base row; on the device an id
            >= max_slots counts as one, too.
        num_rows: rows of the tensors of this step where the batch is padded; the rows after
            the live ones are base rows.
        uploaded: a tensor of this device, at least as long, which begins with the values of
            token_slots when the work queued so far is done. Nothing is copied then.
        Raises ValueError with nothing changed.
        """
        may_have = self.check(token_slots)
        num_live = token_slots.shape[0]
        self.expect(num_live if num_rows is None else num_rows, num_live, may_have=may_have)
        if uploaded is not None:
            token_slots = uploaded
        if token_slots.device != self.token_slots.device:
            token_slots = upload(token_slots, self.token_slots.device)
        self.install(token_slots, num_live)

    def check(self, token_slots: Tensor) -> bool:
        """Whether a mapping may have a row with an adapter: on the CPU whether it has one.
        ValueError where `prepare` would refuse it for any number of rows."""
        if token_slots.dtype != torch.int32 or token_slots.dim() != 1:
            raise ValueError(
                "token_slots must be int32 with one dimension "
                f"(got {token_slots.dtype} with shape {list(token_slots.shape)})"
            )
        if not token_slots.is_contiguous():
            raise ValueError(
                f"token_slots must be contiguous (got a stride of {token_slots.stride(0)})"
            )
        if not token_slots.is_cpu:
            device, found = self.token_slots.device, token_slots.device
            if found != device:
                allowed = "cpu" if device.type == "cpu" else f"{device} or cpu"
                raise ValueError(f"token_slots must be on {allowed} (got {found})")
            # checking device data would need a sync; the kernel treats an unknown id as base
            return True
        low, high = _range(token_slots)
        if low < -1 or high >= self.max_slots:
            raise ValueError(
                f"token_slots must be -1 to {self.max_slots - 1} (got {low} to {high})"
            )
        return high >= 0

    def expect(self, num_rows: int, num_live: int, *, may_have: bool) -> None:
        """What the host knows of the next step, whose tables `install` writes, here or in a graph
        that is replayed: its rows, how many of them are live, and what `check` said of these.
        Raises ValueError with nothing changed."""
        check_option(self.tile_rows)
        if num_rows > self.max_tokens:
            raise ValueError(f"token_slots may have {self.max_tokens} rows (got {num_rows})")
        if num_rows < num_live:
            raise ValueError(
                f"num_rows must be at least {num_live}, the live rows (got {num_rows})"
            )
        self._note_adapters(may_have)
        self._set_rows(num_rows)

    def install(self, token_slots: Tensor, num_live: int) -> None:
        """Queue the kernel that writes all tables, in tiles of the height of the expected rows.
        token_slots: int32 [at least num_live] on this device. It may be captured: a replay writes
        the tables of what `token_slots` holds then."""
        block = 1024 if self.max_tokens <= 1024 else 4096
        with on_device_of(self.token_slots):
            prepare_kernel[(self.max_slots,)](
                token_slots,
                self.token_slots,
                self.tile_slots,
                self.tile_rows,
                self.num_tiles,
                num_live,
                self.max_tokens,
                self.tile_slots.shape[0],
                self.tile_rows.shape[0],
                self.max_slots,
                HEIGHT=self.height_of(self.num_rows),
                NUM_BINS=max(16, power_of_2(self.max_slots)),
                BLOCK=block,
                num_warps=4 if block == 1024 else 8,
            )

    @contextmanager
    def without_adapters(self, num_rows: int) -> Iterator[None]:
        """Prepare a step of `num_rows` base rows, and declare until this is left that all steps are
        of base rows alone: operators launch no kernel of the adapters, and none is in a graph that
        is captured meanwhile. Such a graph must never be replayed for other batches.

        Until then `prepare` raises ValueError for rows with an adapter, and for a mapping on a GPU,
        of which the host does not know the rows. Raises ValueError with nothing changed.
        """
        if self._declared is not None:
            raise ValueError("the batch is declared to be without adapters already")
        self.prepare(torch.empty(0, dtype=torch.int32, device="cpu"), num_rows=num_rows)
        declared = self._declared = BaseRows(is_declared=True)
        self._step.base_rows = declared
        try:
            yield
        finally:
            # for pairs that were prepared meanwhile, too, which a replay may change
            declared.is_over = True
            self._declared = None
            self._step.base_rows = BaseRows()

    def _note_adapters(self, may_have: bool) -> None:
        if may_have and self._declared is not None:
            raise ValueError(
                "token_slots must be on the CPU and all -1 while the batch is declared to be "
                "without adapters"
            )
        self._step.base_rows = None if may_have else self._declared or BaseRows()

    def _set_rows(self, num_rows: int) -> None:
        self.num_rows = self._step.num_rows = num_rows


def _range(token_slots: Tensor) -> tuple[int, int]:
    """The least and the greatest slot of a mapping on the CPU; a base row where it has no rows."""
    values = token_slots.numpy()
    if not values.size:
        return -1, -1
    # numpy finds the place of an extreme several times faster than the extreme itself
    return values.item(values.argmin()), values.item(values.argmax())
