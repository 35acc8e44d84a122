"""Pinned memory that copies to a device are queued from."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lorakernels.runtime import streams

# An event costs the host as much as the copy before it, so several copies share one.
_COPIES = 16
# pinned bytes of the blocks that share one, but for a block that is larger by itself
_MOST_BYTES = 1 << 20


class Staging:
    """Queues copies of host buffers of one size, each from a pinned block of its own.

    Blocks are written one after the other, and again only after the copies that read them have run,
    as the event behind the last one says. A single block would be read when it has changed (vllm
    #36013). Nothing waits for a block: while all of them are in use, others are made. The copies
    must be queued on one stream, or on streams that wait for each other.
    """

    def __init__(self) -> None:
        # in the order of their copies; the first ones are free as soon as their event is done
        self._used: deque[_Blocks] = deque()
        self._now: _Blocks | None = None

    def upload(self, host: NDArray[np.uint8], target: Tensor) -> None:
        """Copy `host` into `target`, uint8 of the same size, queued without waiting on the current
        stream of its device. `host` may be overwritten as soon as this returns."""
        if target.is_cpu:
            target.copy_(torch.from_numpy(host))
            return
        blocks = self._now or self._free_blocks(host.size, target.device)
        source, memory = blocks.parts[blocks.num_written]
        memory[:] = host
        target.copy_(source, non_blocking=True)
        blocks.num_written += 1
        self._now = blocks
        if blocks.num_written == len(blocks.parts):
            self._set_aside(blocks, target.device)

    def _free_blocks(self, size: int, device: torch.device) -> _Blocks:
        if self._used and self._used[0].copied.query():
            return self._used.popleft()
        count = min(_COPIES, max(1, _MOST_BYTES // max(1, size)))
        pinned = torch.empty((count, size), dtype=torch.uint8, device="cpu", pin_memory=True)
        module: Any = streams.stream_module(device)
        return _Blocks(module.Event(), [(part, part.numpy()) for part in pinned])

    def _set_aside(self, blocks: _Blocks, device: torch.device) -> None:
        """All of them are written: they are free again when their copies have run."""
        module: Any = streams.stream_module(device)
        # by its number, which torch takes as it is
        blocks.copied.record(module.current_stream(device.index))
        blocks.num_written = 0
        self._used.append(blocks)
        self._now = None


@dataclass(slots=True)
class _Blocks:
    """Pinned blocks with their memory, how many of them were written since they were free, and the
    event behind the copy of the last one."""

    copied: Any
    parts: list[tuple[Tensor, NDArray[np.uint8]]]
    num_written: int = 0
