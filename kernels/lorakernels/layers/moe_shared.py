"""The shared experts of a MoE layer beside the routed ones."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from lorakernels.moe.layer.forms import MoEForm, plan_form
from lorakernels.runtime.options import dual_stream
from lorakernels.runtime.streams import fork_join
from lorakernels.runtime.tuning import tuning_of


@torch.no_grad()
def add_shared(
    routed: Callable[[], Tensor],
    shared: Callable[[Tensor], Tensor],
    x: Tensor,
    form: MoEForm | None,
    *,
    num_pairs: int,
) -> Tensor:
    """The outputs of the routed experts, as `routed` makes them, and of the shared ones, added up;
    as x is, and without a gradient. Raises ValueError."""
    if not _is_beside(x.device, form, num_pairs):
        found = shared(x)
        _check_outputs(found, x)
        return routed().view(x.shape).add_(found)
    # what the side allocates must not leave it
    added = torch.empty_like(x, memory_format=torch.contiguous_format)

    def beside() -> None:
        found = shared(x)
        _check_outputs(found, x)
        added.copy_(found)

    out = fork_join(x.device, routed, beside)
    return out.view(x.shape).add_(added)


def _check_outputs(found: Tensor, x: Tensor) -> None:
    if found.shape != x.shape or found.dtype != x.dtype:
        raise ValueError(
            f"shared must return {list(x.shape)} in {x.dtype} "
            f"(got {list(found.shape)} in {found.dtype})"
        )


def _is_beside(device: torch.device, form: MoEForm | None, num_pairs: int) -> bool:
    """Whether the shared experts have a stream of their own. They are no operator, and a traced
    graph contains no operation on streams."""
    if torch.compiler.is_compiling():
        return False
    if form is None:
        form = plan_form(num_pairs, tuning_of(device), dual_stream=dual_stream(device))
    return form is not MoEForm.SINGLE
