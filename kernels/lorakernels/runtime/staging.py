"""Pinned memory that copies to a device are queued from."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lorakernels.runtime import streams


class Staging:
    """Queues copies of host buffers of one size, each from a pinned block of its own.

    A block is written again only after the copy that reads it has run, as its event says. A single
    block would be read when it has changed (vllm #36013). Nothing waits for a block: while all of
    them are in use, another one is made.
    """

    def __init__(self) -> None:
        # in the order of their copies: the block, its memory, and the event behind its copy
        self._blocks: deque[tuple[Tensor, NDArray[np.uint8], Any]] = deque()

    def upload(self, host: NDArray[np.uint8], target: Tensor) -> None:
        """Copy `host` into `target`, uint8 of the same size, queued without waiting on the current
        stream of its device. `host` may be overwritten as soon as this returns."""
        if target.is_cpu:
            target.copy_(torch.from_numpy(host))
            return
        device = target.device
        module: Any = streams.stream_module(device)
        if not self._blocks or not self._blocks[0][2].query():
            new = torch.empty(host.shape, dtype=torch.uint8, device="cpu", pin_memory=True)
            self._blocks.appendleft((new, new.numpy(), module.Event()))
        block, memory, copied = self._blocks.popleft()
        memory[:] = host
        target.copy_(block, non_blocking=True)
        # by its number, which torch takes as it is
        copied.record(module.current_stream(device.index))
        self._blocks.append((block, memory, copied))
