"""Faults of the look-up of an embedding's adapters."""

from __future__ import annotations

from loragate.faults.corpus.points import planting
from loragate.faults.model import Group

_kernel = planting("lorakernels.dense.kernels", Group.LAYER)
_layer = planting("lorakernels.layers.embedding", Group.LAYER)
_operator = planting("lorakernels.dense.embedding", Group.LAYER)

FAULTS = (
    _kernel(
        "foreign-id-looked-up-in-the-next-rank",
        "known = live & (column >= 0) & (column < V)",
        "known = live & (column >= 0)",
        source="own",
        why="An id beyond a rank's part of the vocabulary reads a column of the next row of A.",
    ),
    _kernel(
        "negative-id-looked-up",
        "known = live & (column >= 0) & (column < V)",
        "known = live & (column < V)",
        source="own",
        why="An id before a rank's part of the vocabulary reads what lies before its row of A.",
    ),
    _kernel(
        "ids-of-the-first-rank",
        "column = ids.to(tl.int64) - first_id",
        "column = ids.to(tl.int64)",
        source="own",
        why="Each tensor-parallel rank looks ids up as if it held the first ones.",
    ),
    _kernel(
        "embedding-of-the-first-slot",
        "cells = (slot.to(tl.int64) * R + offs_r)[None, :] * V + column[:, None]",
        "cells = offs_r.to(tl.int64)[None, :] * V + column[:, None]",
        source="own",
        why="All tokens get A of the first slot.",
    ),
    _kernel(
        "look-up-assumes-a-stride-of-one",
        "ids_ptr + rows.to(tl.int64) * stride_ids, mask=live, other=-1)",
        "ids_ptr + rows.to(tl.int64), mask=live, other=-1)",
        source="own",
        why="Ids of every second place are read as if they were dense.",
    ),
    _kernel(
        "look-up-of-the-first-tiles-alone",
        "for tile in range(tl.program_id(0), num_tiles, tl.num_programs(0)):\n"
        "        slot = tl.load(tile_slots_ptr + tile)",
        "for tile in range(tl.program_id(0), tl.minimum(num_tiles, tl.program_id(0) + 1)):\n"
        "        slot = tl.load(tile_slots_ptr + tile)",
        source="own",
        why="Tiles beyond the programs of a launch keep the shrink output of another layer.",
    ),
    _operator(
        "look-up-with-split-partials",
        "return replace(shape_of(num_rows, a, [width]), in_features=1)",
        "return shape_of(num_rows, a, [width])",
        source="own",
        why="The expand adds up split-K partials that a look-up never writes.",
    ),
    _layer(
        "foreign-ids-get-the-first-row",
        "        out.masked_fill_(is_foreign[:, None], 0)\n",
        "",
        source="own",
        why="Every rank adds a row for each id, and the sum over ranks has several.",
    ),
    _layer(
        "padding-of-the-vocabulary-counted-as-ids",
        "is_foreign = (local < 0) | (local >= inputs.live)",
        "is_foreign = (local < 0) | (local > inputs.live)",
        source="own",
        why="The first id of the next rank is looked up here as well.",
    ),
)
