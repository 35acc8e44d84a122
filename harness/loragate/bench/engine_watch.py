"""What an engine of vLLM does while it is looked at: launches of vLLM's own kernels of adapters,
and how long its graphs take on the device. Nothing is left behind that a timing would see."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import torch

from loragate.subjects.vllm.engine_counts import AdapterLaunches


class LaunchWatch(AdapterLaunches):
    """While it is entered: launches of vLLM's own kernels of adapters, and those of captures."""

    def __enter__(self) -> LaunchWatch:
        _hooks().add(self.hook)
        return self

    def __exit__(self, *error: object) -> None:
        _hooks().remove(self.hook)


class ReplayClock:
    """While it is entered: the time of each replay of a CUDA graph, on the device."""

    def __init__(self) -> None:
        replay = torch.cuda.CUDAGraph.replay
        self._events: list[tuple[Any, Any]] = []

        def timed(graph: torch.cuda.CUDAGraph) -> None:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            start.record()
            replay(graph)
            end.record()
            self._events.append((start, end))

        self._patch = patch.object(torch.cuda.CUDAGraph, "replay", timed)

    def __enter__(self) -> ReplayClock:
        self._patch.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._patch.stop()

    def microseconds(self) -> list[float]:
        """Of each replay."""
        torch.cuda.synchronize()
        return [start.elapsed_time(end) * 1e3 for start, end in self._events]


def _hooks() -> Any:
    # imported where it is used: a machine may have no Triton
    from triton import knobs

    return knobs.runtime.launch_enter_hook
