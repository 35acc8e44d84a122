"""Launches of MoE kernels whose rank is below the least that a tensor core multiplies."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from lorakernels.moe.delta.plan import MoEPath
from lorakernels.moe.specs import Problem, launch_delta

_PATHS = (MoEPath.TWO_KERNEL, MoEPath.ONE_SHOT)


def launches(compute_capability: int) -> Iterator[tuple[str, Callable[[], None]]]:
    pdl = compute_capability >= 90
    for path in _PATHS:
        label = path.name.lower()
        problem = Problem(label, 64, (48,), 4, 2, 32, 4, path)
        yield label, partial(launch_delta, problem, pdl=pdl)
