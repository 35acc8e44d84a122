"""What `bench moe` times of vLLM: each path of its LoRA of experts, with and without alignment.

Invariant: the paths work on one set of weights and write one output, and a call holds whatever a
step of a server would launch for it on the device, no more.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

from torch import Tensor

from loragate.matrix.case import Case, Path
from loragate.subjects.protocol import Batch
from loragate.subjects.vllm_moe import VllmMoEInstance, refusal

# the plan of its layers takes one of the first two
TIMED_PATHS = (Path.ONE_SHOT, Path.SMALL_BATCH, Path.TWO_KERNEL)


@dataclass(frozen=True, slots=True)
class DeltaCalls:
    """Both add the delta to the output of the batch, or store it, as the case has it."""

    # pairs are assigned to programs before, once for all
    launch: Callable[[], Tensor]
    # alignment in each call; a path without one hands the expert ids over
    aligned_launch: Callable[[], Tensor]


def vllm_delta_calls(
    case: Case, instance: VllmMoEInstance, batch: Batch
) -> Mapping[Path, DeltaCalls]:
    """The calls of each path that takes the case.

    `instance` is one that VllmSubject opened for the case, with adapters in its slots and
    prepared for the slots of the batch, which has routes. A call may be captured after it ran
    once. The calls stay right until the next `prepare` or `load`.
    """
    routes = batch.routes
    assert routes is not None, "a site with experts has routes"
    calls = {}
    for path in TIMED_PATHS:
        if refusal(replace(case, path=path)) is not None:
            continue
        on_path = instance.on_path(path)
        assignment = on_path.assign(routes)
        calls[path] = DeltaCalls(
            partial(on_path.launch, batch.x, batch.out, routes, assignment),
            partial(on_path.apply, batch.x, batch.out, routes),
        )
    return calls
