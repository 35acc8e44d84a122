"""The tables of a batch and the size of its shrink output, against their documentation."""

from __future__ import annotations

import math
import random
from itertools import product

import torch
from torch import Tensor

from loragate.core.machine import detect_machine
from loragate.execution.kernel_compiles import kernels_compiled
from loragate.inputs.poison import poisoned_allocations
from lorakernels.batch.metadata import BatchMetadata, max_tiles, tile_height
from lorakernels.dense.ops import DenseWorkspace, shrunk_shape
from lorakernels.dense.weights import LoRAFactors, SlotWeights

_SLOTS = 5
_ROWS = 70
# three blocks of rows in the kernel
_LONG = 9000
_LARGEST = 300


def check_metadata() -> str | None:
    """Step after step on one instance, then a batch of several blocks."""
    wrong = _too_small()
    if wrong is not None:
        return wrong
    rng = random.Random(7)
    metadata = BatchMetadata(max_tokens=_ROWS, max_slots=_SLOTS, device=detect_machine().device)
    for live, padded in ((_ROWS, _ROWS), (33, 40), (1, 1), (20, 32), (0, 9), (17, _ROWS)):
        slots = [rng.randrange(-1, _SLOTS) for _ in range(live)]
        wrong = _step(metadata, slots, padded)
        if wrong is not None:
            return wrong
    large = BatchMetadata(max_tokens=_LONG, max_slots=2, device=metadata.token_slots.device)
    wrong = _step(large, [row // 3 % 3 - 1 for row in range(_LONG)], _LONG)
    return wrong or _foreign(metadata) or _compiled_anew(large)


def check_dummy_run() -> str | None:
    """A step before any mapping was installed, as a server warms up, is a step of base rows."""
    device = detect_machine().device
    with poisoned_allocations():
        metadata = BatchMetadata(max_tokens=_ROWS, max_slots=2, device=device)
        weights = SlotWeights(
            num_slots=2,
            slice_widths=(16,),
            in_features=16,
            rank=4,
            dtype=torch.float32,
            device=device,
        )
        workspace = DenseWorkspace([weights], max_tokens=_ROWS)
    weights.load(0, [LoRAFactors(torch.ones(4, 16), torch.ones(16, 4), 1.0)])
    x, out = torch.ones(_ROWS, 16, device=device), torch.ones(_ROWS, 16, device=device)
    tables = (metadata.tile_slots, metadata.tile_rows, metadata.num_tiles)
    held = [int(table.max()) for table in tables]
    if held != [-1, -1, 0]:
        return f"fresh tables must hold -1, -1 and 0 at most (got {held})"
    torch.ops.lorakernels.dense_delta(
        x,
        weights.a,
        weights.b,
        weights.ranks,
        weights.scales,
        [16],
        *tables,
        workspace.shrunk,
        out,
    )
    return None if bool((out == 1).all()) else "rows got a delta before any mapping was installed"


def check_workspace() -> str | None:
    """One workspace is large enough for every smaller batch, which splits K further."""
    for widths, in_features, rank in (((64,), 4096, 512), ((64, 16, 16), 2048, 16)):
        weights = SlotWeights(
            num_slots=4,
            slice_widths=widths,
            in_features=in_features,
            rank=rank,
            dtype=torch.bfloat16,
            device="meta",
        )
        size = DenseWorkspace([weights], max_tokens=_LARGEST).shrunk.numel()
        for rows in range(1, _LARGEST + 1):
            needed = math.prod(shrunk_shape(rows, weights))
            if needed > size:
                return f"{rows} rows of rank {rank} need {needed} values, there are {size}"
    return None


def _too_small() -> str | None:
    """A sentence if some batch has more tiles than the tables can hold."""
    for rows, slots, height in product(range(1, 40), range(1, 7), (2, 4)):
        # all slots but one have a single row
        users = min(slots, rows)
        needed = users - 1 + -(-(rows - users + 1) // height)
        if max_tiles(rows, slots, height) < needed:
            return f"{rows} rows of {slots} slots need {needed} tiles of {height} rows"
    return None


def _step(metadata: BatchMetadata, slots: list[int], padded: int) -> str | None:
    token_slots = torch.tensor(slots, dtype=torch.int32, device=metadata.token_slots.device)
    metadata.prepare(token_slots, num_rows=padded)
    return _compare(metadata, slots, padded)


def _foreign(metadata: BatchMetadata) -> str | None:
    """Ids that no slot has, which only a mapping on the device may hold, are base rows."""
    if metadata.token_slots.device.type == "cpu":
        return None
    slots = [0, _SLOTS, 2, 2**30, -7, 1]
    token_slots = torch.tensor(slots, dtype=torch.int32, device=metadata.token_slots.device)
    metadata.prepare(token_slots)
    return _compare(metadata, [s if 0 <= s < _SLOTS else -1 for s in slots], len(slots))


def _compiled_anew(metadata: BatchMetadata) -> str | None:
    """A batch size that Triton could specialise on must not cause a recompilation."""
    if metadata.token_slots.device.type == "cpu":
        return None
    compiled: list[str] = []
    for rows in (20, 16, 1, 17):
        with kernels_compiled(compiled):
            _step(metadata, [0] * rows, rows)
    if len(compiled) <= 1:
        return None
    return f"batches of 20, 16, 1 and 17 rows compiled {', '.join(compiled)}"


def _compare(metadata: BatchMetadata, slots: list[int], padded: int) -> str | None:
    height = tile_height(padded, metadata.tuning)
    tile_slots, tile_rows = _tiles(slots, height)
    wanted = {
        "token_slots": (metadata.token_slots, slots),
        "tile_slots": (metadata.tile_slots, tile_slots),
        "tile_rows": (metadata.tile_rows, tile_rows),
        "num_tiles": (metadata.num_tiles, [len(tile_slots)]),
    }
    for name, (table, values) in wanted.items():
        wrong = _difference(table, values)
        if wrong is not None:
            return f"{name} after a step of {len(slots)} rows, padded to {padded}: {wrong}"
    return None


def _tiles(slots: list[int], height: int) -> tuple[list[int], list[int]]:
    tile_slots: list[int] = []
    tile_rows: list[int] = []
    for slot in range(max(slots, default=-1) + 1):
        rows = [row for row, user in enumerate(slots) if user == slot]
        rows += [-1] * (-len(rows) % height)
        tile_slots += [slot] * (len(rows) // height)
        tile_rows += rows
    return tile_slots, tile_rows


def _difference(table: Tensor, values: list[int]) -> str | None:
    """After the values there must be only -1."""
    wanted = torch.full((table.numel(),), -1, dtype=table.dtype)
    wanted[: len(values)] = torch.tensor(values, dtype=table.dtype)
    places = (table.cpu() != wanted).nonzero().flatten().tolist()
    if not places:
        return None
    first = places[0]
    return f"entry {first} is {int(table[first])}, should be {int(wanted[first])}"
