"""Seeded data: adapters, batches, base layers. Same case and seed, same numbers."""

from __future__ import annotations

from loragate.inputs.batch import copy_batch, make_base, make_batch, reordered_rows
from loragate.inputs.draw import DataKind, torch_dtype
from loragate.inputs.pool import Dead, make_pool

__all__ = [
    "DataKind",
    "Dead",
    "copy_batch",
    "make_base",
    "make_batch",
    "make_pool",
    "reordered_rows",
    "torch_dtype",
]
