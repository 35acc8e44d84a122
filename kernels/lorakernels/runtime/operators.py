"""Functions that write their operands as operators of torch, `torch.ops.lorakernels.NAME`, which a
traced graph takes as they are.

They are registered with the dispatcher itself. `torch.library.custom_op` would put several
functions of Python around each call, and they take as long as all else that the host does for a
launch; in a step that no graph replays, the device may wait for the host. What these functions do
for gradients is nothing here, where no result is returned. An operator that returns one should be a
`custom_op`, whose `backward` raises.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, ParamSpec

import torch

_Operands = ParamSpec("_Operands")

# has no annotations
_library: Any = torch.library.Library
_LIBRARY = _library("lorakernels", "FRAGMENT")


def register_operator(
    name: str, *, mutates: Collection[str]
) -> Callable[[Callable[_Operands, None]], Callable[_Operands, None]]:
    """Register a function for every device; its schema follows from its annotations. mutates: the
    parameters that it writes."""

    def register(function: Callable[_Operands, None]) -> Callable[_Operands, None]:
        schema = torch.library.infer_schema(function, mutates_args=mutates)
        _LIBRARY.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
        _LIBRARY.impl(name, function, "CompositeExplicitAutograd")
        torch.library.register_fake(f"lorakernels::{name}", _write_nothing, lib=_LIBRARY)
        return function

    return register


def _write_nothing(*operands: object, **others: object) -> None:
    """What operators do with tensors without data."""
