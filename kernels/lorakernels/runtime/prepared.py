"""Launches that are prepared once for all steps whose operands are alike.

Before a kernel runs the host chooses a plan, checks the operands, and Triton looks for the compiled
kernel by all of its arguments. In a step that no graph replays the device may wait for that, in
every layer. None of it depends on what the operands hold, and hardly anything on where they are: so
the launches are kept by the layout of the operands, and those of a step are put into them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from threading import Lock
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.jit import JITFunction

from lorakernels.runtime.device import on_device_of
from lorakernels.runtime.launching import Launch, is_noting, noted_launches
from lorakernels.runtime.tuning import Tuning

# a server meets more sizes of steps than are worth the memory
_MOST = 1 << 12


class FixedTensors:
    """Tensors whose layout does not change: it is looked at once. They may be operands of many
    steps, such as the buffers of a server."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self.tensors = tuple(tensors)

    @cached_property
    def layout(self) -> Hashable:
        return tuple(map(_layout, self.tensors))


Operand: TypeAlias = Tensor | FixedTensors | None


def launch_prepared(
    plan: Callable[..., None],
    operands: Sequence[Operand],
    constants: tuple[Hashable, ...],
    tuning: Tuning,
) -> None:
    """Make the launches of `plan(*tensors, *constants)`, which begins each of them with `start`.
    tensors: the operands, with those of FixedTensors one by one.

    `plan` is called for the first operands of a layout, and again where its launches cannot be
    kept; so it computes nothing. Of a tensor it may read the shape, strides, dtype, device and
    whether its address is a multiple of 16; of what the process has set, `tuning`. What it
    allocates is allocated anew for each call, on the stream of the caller. Where it raises, nothing
    is launched or kept. Options of Triton that change between two launches of a layout have no
    effect on the second one.
    """
    tensors = _tensors_of(operands)
    if is_noting():
        plan(*tensors, *constants)
        return
    with on_device_of(_first(tensors)):
        key = plan, constants, tuning, tuple(map(_layout, operands))
        prepared = _PREPARED.get(key)
        if prepared is None:
            prepared = _prepare(plan, tensors, constants)
            _keep(key, prepared)
        if prepared.launches is None:
            plan(*tensors, *constants)
            return
        tensors += [scratch.allocate() for scratch in prepared.scratch]
        for launch in prepared.launches:
            launch(tensors)


def _tensors_of(operands: Sequence[Operand]) -> list[Tensor | None]:
    tensors: list[Tensor | None] = []
    for operand in operands:
        if isinstance(operand, FixedTensors):
            tensors += operand.tensors
        else:
            tensors.append(operand)
    return tensors


def _layout(operand: Operand) -> Hashable:
    """All that the launches may depend on. Triton compiles anew for addresses that are multiples of
    16 and for others."""
    if operand is None:
        return None
    if isinstance(operand, FixedTensors):
        return operand.layout
    is_aligned = operand.data_ptr() % 16 == 0
    return operand.shape, operand.stride(), operand.dtype, operand.device, is_aligned


def _first(tensors: Sequence[Tensor | None]) -> Tensor:
    return next(tensor for tensor in tensors if tensor is not None)


@dataclass(frozen=True, slots=True)
class _Scratch:
    """A tensor that the plan has allocated."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    def allocate(self) -> Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device=self.device)


@dataclass(frozen=True, slots=True, eq=False)
class _PreparedLaunch:
    """`kernel` is compiled, or interpreted. `args` lack the tensors: `places` are the positions of
    single ones with their numbers, `groups` those of named tuples."""

    kernel: Any
    grid: tuple[int, ...]
    args: Sequence[Any]
    options: Mapping[str, Any]
    places: Sequence[tuple[int, int]]
    groups: Sequence[tuple[int, Callable[..., Any], Sequence[int]]]

    def __call__(self, tensors: Sequence[Tensor | None]) -> None:
        args = list(self.args)
        for position, number in self.places:
            args[position] = tensors[number]
        for position, group, numbers in self.groups:
            args[position] = group(*(tensors[number] for number in numbers))
        self.kernel[self.grid](*args, **self.options)


@dataclass(frozen=True, slots=True, eq=False)
class _Prepared:
    """The launches of a plan; None where they cannot be kept."""

    launches: Sequence[_PreparedLaunch] | None
    scratch: Sequence[_Scratch] = ()


_PREPARED: dict[Hashable, _Prepared] = {}
_LOCK = Lock()


def _keep(key: Hashable, prepared: _Prepared) -> None:
    with _LOCK:
        while len(_PREPARED) >= _MOST:
            # the oldest one: a step that finds its launches changes nothing, and takes no lock
            del _PREPARED[next(iter(_PREPARED))]
        _PREPARED[key] = prepared


def _prepare(
    plan: Callable[..., None],
    operands: Sequence[Tensor | None],
    constants: tuple[Hashable, ...],
) -> _Prepared:
    with noted_launches() as launches, _NoWork():  # type: ignore[no-untyped-call]
        plan(*operands, *constants)
    numbering = _Numbering(operands)
    try:
        made = [_prepare_launch(launch, numbering) for launch in launches]
    except _NotKeptError:
        return _Prepared(None)
    return _Prepared(made, numbering.scratch)


class _NoWork(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Within, no operation of torch computes: it would run for the first step of a layout alone."""

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = operation.name()
        assert operation.is_view or name.startswith("aten::empty"), f"a plan must not call {name}"
        return operation(*args, **(kwargs or {}))


def _prepare_launch(launch: Launch, numbering: _Numbering) -> _PreparedLaunch:
    args: list[Any] = list(launch.args)
    places: list[tuple[int, int]] = []
    groups: list[tuple[int, Callable[..., Any], Sequence[int]]] = []
    for position, value in enumerate(launch.args):
        if isinstance(value, Tensor):
            places.append((position, numbering.of(value)))
            args[position] = None
        elif isinstance(value, tuple) and any(isinstance(part, Tensor) for part in value):
            groups.append((position, type(value), numbering.of_group(value)))
            args[position] = None
    if any(isinstance(value, Tensor) for value in launch.options.values()):
        raise _NotKeptError
    if not isinstance(launch.kernel, JITFunction):
        return _PreparedLaunch(
            launch.kernel, tuple(launch.grid), args, launch.options, places, groups
        )
    compiled = launch.compile()
    if not hasattr(type(compiled), "__getitem__"):
        # within Triton's AsyncCompileMode it may be compiled later
        raise _NotKeptError
    # a compiled kernel takes all arguments in their order, constants as well
    names = launch.kernel.arg_names[len(args) :]
    args += [launch.options[name] for name in names]
    grid = (*launch.grid, 1, 1)[:3]
    return _PreparedLaunch(compiled, grid, args, {}, places, groups)


class _NotKeptError(Exception):
    """A launch has a tensor of which the operands do not say where it is, or no compiled kernel."""


class _Numbering:
    """The numbers of tensors: operands in their order, then `scratch`."""

    def __init__(self, operands: Sequence[Tensor | None]) -> None:
        self._operands = operands
        self._allocated: list[Tensor] = []

    @property
    def scratch(self) -> Sequence[_Scratch]:
        return [_Scratch(each.shape, each.dtype, each.device) for each in self._allocated]

    def of(self, tensor: Tensor) -> int:
        known = [*self._operands, *self._allocated]
        found = _numbers(known, lambda each: each is tensor)
        if not found:
            # a kernel gets no more of a view than where it begins
            found = _numbers(self._operands, lambda each: _begins(each, tensor))
        if len(found) == 1:
            return found[0]
        if any(_shares_memory(each, tensor) for each in known) or not tensor.is_contiguous():
            raise _NotKeptError
        self._allocated.append(tensor)
        return len(known)

    def of_group(self, group: tuple[Any, ...]) -> Sequence[int]:
        """Of a named tuple of tensors."""
        if not hasattr(group, "_fields") or not all(isinstance(part, Tensor) for part in group):
            raise _NotKeptError
        return tuple(map(self.of, group))


def _numbers(
    tensors: Sequence[Tensor | None], test: Callable[[Tensor | None], bool]
) -> Sequence[int]:
    return [number for number, tensor in enumerate(tensors) if test(tensor)]


def _begins(operand: Tensor | None, tensor: Tensor) -> bool:
    """Whether a tensor is a view that begins where an operand does."""
    if operand is None or not _shares_memory(operand, tensor):
        return False
    return operand.data_ptr() == tensor.data_ptr() and operand.dtype == tensor.dtype


def _shares_memory(known: Tensor | None, tensor: Tensor) -> bool:
    if known is None:
        return False
    address = tensor.untyped_storage().data_ptr()
    return address != 0 and known.untyped_storage().data_ptr() == address
