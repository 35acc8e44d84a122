"""The calls that `bench moe` times: each path of a delta, with and without alignment.

Invariant: all paths use the same weights and output, and a call launches exactly what a step of a
server would launch for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, Self

from torch import Tensor

from loragate.matrix.case import Case, Path
from loragate.protocol import Batch, Capabilities, MoEInstance, Routes, unsupported


class PathwiseInstance(MoEInstance, Protocol):
    """An instance that can run a given path; `apply` is `launch` on the result of `assign`."""

    def on_path(self, path: Path) -> Self: ...

    def assign(self, routes: Routes) -> Any: ...

    def launch(self, x: Tensor, out: Tensor, routes: Routes, assignment: Any) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class DeltaCalls:
    """Both add the delta to the output of the batch, or store it, as the case says."""

    # token-expert pairs were assigned to programs before
    launch: Callable[[], Tensor]
    # alignment in each call; a path without alignment passes the expert ids on
    aligned_launch: Callable[[], Tensor]


def delta_calls(
    case: Case,
    have: Capabilities,
    instance: PathwiseInstance,
    batch: Batch,
    paths: Iterable[Path],
) -> Mapping[Path, DeltaCalls]:
    """The calls of each of `paths` that takes the case.

    `instance` has adapters in its slots and is prepared for the slots of the batch, which has
    routes. A call may be captured after it ran once. The calls stay right until the next
    `prepare` or `load`.
    """
    routes = batch.routes
    assert routes is not None, "an MoE site has routes"
    calls = {}
    for path in paths:
        if unsupported(replace(case, path=path), have) is not None:
            continue
        on_path = instance.on_path(path)
        assignment = on_path.assign(routes)
        calls[path] = DeltaCalls(
            partial(on_path.launch, batch.x, batch.out, routes, assignment),
            partial(on_path.apply, batch.x, batch.out, routes),
        )
    return calls
