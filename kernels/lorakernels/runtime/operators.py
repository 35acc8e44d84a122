"""Functions that write their operands as operators of torch, `torch.ops.lorakernels.NAME`, which a
traced graph takes as they are.

They are registered with the dispatcher itself. `torch.library.custom_op` would put several
functions of Python around each call, and they take as long as all else that the host does for a
launch; in a step that no graph replays, the device may wait for the host. What these functions are
for is done here as well: torch's compiler does not look into an operator, nothing in it is recorded
for gradients, and whoever saved what it writes for a gradient learns of the change. An operator
that returns something should be a `custom_op`, whose `backward` raises.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from inspect import signature
from typing import Any, ParamSpec

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.autograd.graph import increment_version

_Operands = ParamSpec("_Operands")

# has no annotations
_library: Any = torch.library.Library
# by operator: one that is registered again, such as of a module that is loaded again, replaces it
_LIBRARIES: dict[str, Any] = {}


def register_operator(
    name: str, *, mutates: Collection[str]
) -> Callable[[Callable[_Operands, None]], Callable[_Operands, None]]:
    """Register a function for every device; its schema follows from its annotations. mutates: the
    parameters that it writes."""

    def register(function: Callable[_Operands, None]) -> Callable[_Operands, None]:
        library = _LIBRARIES[name] = _library("lorakernels", "FRAGMENT")
        schema = torch.library.infer_schema(function, mutates_args=mutates)
        library.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
        places = [
            n for n, parameter in enumerate(signature(function).parameters) if parameter in mutates
        ]
        kernel = _disable_dynamo(_kernel_of(function, places))
        library.impl(name, kernel, "CompositeExplicitAutograd")
        torch.library.register_fake(f"lorakernels::{name}", _write_nothing, lib=library)
        return function

    return register


def _kernel_of(function: Callable[..., None], places: Sequence[int]) -> Callable[..., None]:
    def kernel(*operands: Any) -> None:
        if torch.is_inference_mode_enabled():
            function(*operands)
            return
        with torch.no_grad():
            function(*operands)
        for place in places:
            _note_change(operands[place])

    return kernel


def _note_change(operand: Tensor | Sequence[Tensor] | None) -> None:
    if operand is not None:
        increment_version(operand)


def _write_nothing(*operands: object, **others: object) -> None:
    """What operators do with tensors without data."""
