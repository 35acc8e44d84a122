"""Who asked for an operation: stacks of the subject's own frames."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

import torch

from loragate.execution.trace.operations import Stack

_FRAMES = 10
_TORCH = Path(torch.__file__).parent
_FOREIGN = (
    f"{_TORCH}/",
    f"{_TORCH.with_name('triton')}/",
    f"{Path(__file__).parents[1]}/",
    contextlib.__file__,
)
# from here on outwards nothing belongs to the subject
_HARNESS = tuple(f"{Path(__file__).parents[2] / folder}/" for folder in ("protocol", "oracles"))


def stack_here() -> Stack:
    """The callers, innermost first, without the frames of torch, Triton and the harness."""
    frames: list[tuple[str, int, str]] = []
    frame = sys._getframe(1)
    while frame is not None and len(frames) < _FRAMES:
        code = frame.f_code
        if code.co_filename.startswith(_HARNESS):
            break
        if not code.co_filename.startswith(_FOREIGN):
            frames.append((code.co_filename, frame.f_lineno, code.co_name))
        frame = frame.f_back  # type: ignore[assignment]
    return tuple(frames)
