"""What lies behind the first slice of a layer, by which the plug-in names all of them.

Its operator of linear layers gets the first slices of A and of B as vLLM holds them: views of the
buffers that the kernels read. A launch that is made again has these views as its arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from torch import Tensor

from loragate.subjects.vllm_lorakernels.deltas import LinearDelta


def _stacks(instance: Any) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    """A and B of all slices."""
    if isinstance(instance, LinearDelta):
        return instance.a, instance.b
    return instance.layer.lora_a_stacked, instance.layer.lora_b_stacked


# by the names of a kernel and of its argument
FIRST_SLICES: Mapping[tuple[str, str], Callable[[Any, Tensor], Sequence[Tensor]]] = (
    MappingProxyType(
        {
            ("lora_shrink_kernel", "a_ptr"): lambda instance, first: _stacks(instance)[0],
            ("lora_expand_kernel", "b_ptr"): lambda instance, first: _stacks(instance)[1],
        }
    )
)
