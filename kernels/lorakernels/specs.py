"""Representative launches of all kernels, for compiling them without a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from lorakernels.dense import specs as dense
from lorakernels.moe import specs as moe


def launches(compute_capability: int) -> Iterator[tuple[str, Callable[[], None]]]:
    """(label, launch) for a GPU, 90 for sm_90; `launch()` launches one or more kernels."""
    yield from dense.launches(compute_capability)
    yield from moe.launches(compute_capability)
