"""Options of the process, from its environment.

They are read at every use: a value that changes takes effect with the next step, also in a traced
graph, whose operators read them as well. Only a CUDA graph keeps what held at its capture.
"""

from __future__ import annotations

import os

import torch

from lorakernels.runtime import streams

DUAL_STREAM = "LORAKERNELS_DUAL_STREAM"
BATCH_INVARIANT = "LORAKERNELS_BATCH_INVARIANT"


def dual_stream(device: torch.device) -> bool:
    """Whether plans may use a second stream: 1 or 0, the default. ValueError for other values,
    and for 1 where the device has no streams."""
    value = os.environ.get(DUAL_STREAM, "0")
    _check_switch(DUAL_STREAM, value)
    if value == "1" and streams.stream_module(device) is None:
        raise ValueError(f"{DUAL_STREAM} must be 0 on {device}, which has no streams (got 1)")
    return value == "1"


def batch_invariant() -> bool:
    """Whether the bits of a row must not depend on the number of rows of its batch: 1 or 0, the
    default. Tables are laid out for one value; steps and operators under the other one are refused.
    ValueError for other values."""
    value = os.environ.get(BATCH_INVARIANT, "0")
    _check_switch(BATCH_INVARIANT, value)
    return value == "1"


def check_batch_invariant(of_tables: bool, of_process: bool) -> None:
    """Raises ValueError when the tables of a batch or of pairs were made under another value of
    LORAKERNELS_BATCH_INVARIANT than the process has now: tiles of another height would be looked
    for in other places, and beyond the end."""
    if of_process != of_tables:
        raise ValueError(
            f"{BATCH_INVARIANT} must be as it was when the tables were made (got {int(of_process)})"
        )


def _check_switch(name: str, value: str) -> None:
    if value not in ("0", "1"):
        raise ValueError(f"{name} must be 0 or 1 (got {value!r})")
