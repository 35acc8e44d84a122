"""What `bench moe` times of a subject: each path of its delta, with and without alignment.

Invariant: the paths work on one set of weights and write one output, and a call holds whatever a
step of a server would launch for it on the device, no more.
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
    """An instance whose `apply` is `launch` on what `assign` returned, on a path of choice."""

    def on_path(self, path: Path) -> Self: ...

    def assign(self, routes: Routes) -> Any: ...

    def launch(self, x: Tensor, out: Tensor, routes: Routes, assignment: Any) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class DeltaCalls:
    """Both add the delta to the output of the batch, or store it, as the case has it."""

    # pairs are assigned to programs before, once for all
    launch: Callable[[], Tensor]
    # alignment in each call; a path without one hands the expert ids over
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
    assert routes is not None, "a site with experts has routes"
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
