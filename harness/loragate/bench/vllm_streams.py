"""vLLM's linear layer with its adapters: on one stream, and on two as its option
VLLM_LORA_ENABLE_DUAL_STREAM has it.

The layer itself needs a server. Its steps are therefore called here, in its order: the fork and
join, the shrink and the expand are the package's own.

Invariant: a fork that cannot be imported gives a reason as a sentence, never an exception.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor

from loragate.core.machine import Machine
from loragate.subjects.vllm.package import headline, importing
from loragate.subjects.vllm.subject import VllmInstance

_MODULE = "vllm.utils.multi_stream_utils"
# (work on the current stream, work on the other stream, two events, the other stream) -> both
# results
Fork = Callable[..., tuple[Tensor, Tensor]]


@cache
def load_fork(machine: Machine) -> Fork | str:
    """vLLM's fork and join, or the reason, as a sentence, why there is none."""
    if machine.device != "cuda":
        return "its second stream needs a GPU"
    try:
        with importing(False):
            module: Any = importlib.import_module(_MODULE)
        return cast(Fork, module.maybe_execute_in_parallel)
    except Exception as error:
        return f"its fork and join cannot be imported: {headline(error)}"


def sequential(base: Callable[[], Tensor], instance: VllmInstance, x: Tensor) -> Tensor:
    """Base, and behind it the delta in place."""
    return instance.apply(x, base())


class DualStream:
    """Base, and beside it the delta in a tensor of its own, which is added afterwards."""

    def __init__(self, fork: Fork, instance: VllmInstance, out_features: int) -> None:
        self._fork, self._instance, self._out_features = fork, instance, out_features
        self._events = torch.cuda.Event(), torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._stream = _side_stream()

    def __call__(self, base: Callable[[], Tensor], x: Tensor) -> Tensor:
        def delta() -> Tensor:
            zeros = torch.zeros(len(x), self._out_features, dtype=x.dtype, device=x.device)
            return self._instance.store(x, zeros)

        out, added = self._fork(base, delta, *self._events, self._stream)
        return out.add_(added)


@cache
def _side_stream() -> torch.cuda.Stream:
    """One for all rows, as vLLM has it: torch hands out 32 in turn, and one of 60 would be the
    stream that a row is captured on."""
    return torch.cuda.Stream()  # type: ignore[no-untyped-call]
