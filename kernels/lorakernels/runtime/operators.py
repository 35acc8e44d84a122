"""Functions as operators of torch, `torch.ops.lorakernels.NAME`, which a traced graph takes as they
are.

They are registered with the dispatcher itself. `torch.library.custom_op` would put several
functions of Python around each call, and they take as long as all else that the host does for a
launch; in a step that no graph replays, the device may wait for the host. What these functions are
for is done here as well: torch's compiler does not look into an operator, nothing in it is recorded
for gradients or cast by `torch.autocast`, whoever saved what it writes for a gradient learns of the
change, and `backward` through what it returns raises.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from inspect import signature
from typing import Any, ParamSpec, TypeAlias, TypeVar

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.autograd.graph import increment_version

_Operands = ParamSpec("_Operands")
_Result = TypeVar("_Result", Tensor, None)
_Operator: TypeAlias = Callable[_Operands, _Result]

# have no annotations
_library: Any = torch.library.Library
_below_autograd: Any = torch._C._AutoDispatchBelowAutograd
_disable_autocast: Any = torch._C._DisableAutocast
# by operator: one that is registered again, such as of a module that is loaded again, replaces it
_LIBRARIES: dict[str, Any] = {}


def register_operator(
    name: str, *, mutates: Collection[str], fake: Callable[..., Tensor] | None = None
) -> Callable[[_Operator[_Operands, _Result]], _Operator[_Operands, _Result]]:
    """Register a function for every device; its schema follows from its annotations. mutates: the
    parameters that it writes. fake: of one that returns a tensor, which aliases none of them, the
    same for tensors without data."""

    def register(function: _Operator[_Operands, _Result]) -> _Operator[_Operands, _Result]:
        library = _LIBRARIES[name] = _library("lorakernels", "FRAGMENT")
        schema = torch.library.infer_schema(function, mutates_args=mutates)
        library.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
        places = [
            n for n, parameter in enumerate(signature(function).parameters) if parameter in mutates
        ]
        kernel = _disable_dynamo(_kernel_of(function, places))
        library.impl(name, kernel, "CompositeExplicitAutograd")
        if fake is not None:
            library.impl(name, _disable_dynamo(_recorded_of(name)), "Autograd")
        for device in ("CPU", "CUDA"):
            library.impl(name, _disable_dynamo(_uncast_of(name)), f"Autocast{device}")
        torch.library.register_fake(f"lorakernels::{name}", fake or _write_nothing, lib=library)
        return function

    return register


def _kernel_of(function: Callable[..., Any], places: Sequence[int]) -> Callable[..., Any]:
    def kernel(*operands: Any) -> Any:
        if torch.is_inference_mode_enabled():
            return function(*operands)
        with torch.no_grad():
            result = function(*operands)
        for place in places:
            _note_change(operands[place])
        return result

    return kernel


def _note_change(operand: Tensor | Sequence[Tensor] | None) -> None:
    if operand is not None:
        increment_version(operand)


def _write_nothing(*operands: object, **others: object) -> None:
    """What operators do with tensors without data."""


def _recorded_of(name: str) -> Callable[..., Tensor]:
    """An operator that returns a tensor, for callers that record gradients."""

    def recorded(*operands: Any) -> Tensor:
        with _below_autograd():
            result: Tensor = getattr(torch.ops.lorakernels, name)(*operands)
        if not torch.is_grad_enabled():
            return result
        tensors = [each for each in _tensors_of(operands) if each.requires_grad]
        if not tensors:
            return result
        noted: Tensor = _Undifferentiated.apply(name, result, *tensors)  # type: ignore[no-untyped-call]
        return noted

    return recorded


def _uncast_of(name: str) -> Callable[..., Any]:
    """An operator for callers within `torch.autocast`: a product in it would be of another dtype
    than `fake` says, or not, as the form of a batch has it."""

    def uncast(*operands: Any) -> Any:
        with _disable_autocast():
            return getattr(torch.ops.lorakernels, name)(*operands)

    return uncast


def _tensors_of(operands: Sequence[Any]) -> Iterator[Tensor]:
    for operand in operands:
        if isinstance(operand, Tensor):
            yield operand
        elif isinstance(operand, (list, tuple)):
            yield from _tensors_of(operand)


class _Undifferentiated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, name: str, result: Tensor, *operands: Tensor) -> Tensor:
        ctx.name = name
        return result.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise RuntimeError(f"lorakernels::{ctx.name} has no gradient")
