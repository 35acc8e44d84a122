"""Launches as the host makes them in the interpreter: tensors, and what a kernel is compiled for.

Without a GPU nothing is compiled. What a launch would be compiled for follows from its arguments: a
kernel is compiled anew for each dtype, each value of a constexpr, an option such as `num_warps`,
and for integers and addresses that are multiples of 16, and integers that are 1.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

from torch import Tensor
from torch.utils._pytree import tree_leaves

from loragate.execution.streams.arguments import tensors_of

_ALIGNED = 16


@dataclass(frozen=True, slots=True)
class HostLaunch:
    """`tensors` by the names of the arguments that hold them; `grid` is empty where it is a
    function of the arguments. `compiled_for` has a value for each argument and each option: equal
    values need no other kernel."""

    kernel: str
    grid: tuple[int, ...]
    tensors: list[tuple[str, Tensor]]
    compiled_for: Mapping[str, Hashable]


@contextmanager
def noted_launches(
    note: Callable[[HostLaunch], None],
    run: Callable[[Callable[[], Any]], Any],
) -> Iterator[None]:
    """Calls `note` ahead of each launch in the interpreter, and `run` with what does it."""
    from triton.runtime.interpreter import InterpretedFunction

    interpret = InterpretedFunction.run

    def interpreted(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        if not warmup:
            tensors = tensors_of(kernel.arg_names, args, options)
            size = () if callable(grid) else tuple(grid)
            compiled_for = _compiled_for(kernel, args, options)
            note(HostLaunch(kernel.fn.__name__, size, tensors, compiled_for))
        return run(partial(interpret, kernel, *args, grid=grid, warmup=warmup, **options))

    with patch.object(InterpretedFunction, "run", interpreted):
        yield


def _compiled_for(
    kernel: Any, args: Sequence[Any], options: Mapping[str, Any]
) -> Mapping[str, Hashable]:
    given = {**dict(zip(kernel.arg_names, args, strict=False)), **options}
    plain = _names(kernel, "do_not_specialize")
    unaligned = _names(kernel, "do_not_specialize_on_alignment") | plain
    constants = _constants(kernel.fn)
    found: dict[str, Hashable] = {}
    for name, value in given.items():
        if name in constants or name not in kernel.arg_names:
            found[name] = repr(value)
        else:
            found[name] = tuple(
                _kind(leaf, is_plain=name in plain, is_aligned=name not in unaligned)
                for leaf in tree_leaves(value)
            )
    return found


def _kind(value: Any, *, is_plain: bool, is_aligned: bool) -> Hashable:
    """What Triton distinguishes of an argument that is no constant."""
    value = getattr(value, "base", value)
    if isinstance(value, Tensor):
        return str(value.dtype), is_aligned and value.data_ptr() % _ALIGNED == 0
    if isinstance(value, int) and not isinstance(value, bool):
        width = "i32" if -(1 << 31) <= value < 1 << 31 else "i64"
        return width, not is_plain and value == 1, is_aligned and value % _ALIGNED == 0
    return type(value).__name__


def _names(kernel: Any, option: str) -> set[str]:
    named = kernel.kwargs.get(option) or ()
    return {kernel.arg_names[one] if isinstance(one, int) else one for one in named}


def _constants(function: Any) -> set[str]:
    annotations = getattr(function, "__annotations__", {})
    return {name for name, kind in annotations.items() if "constexpr" in str(kind)}
