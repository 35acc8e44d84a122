"""A device on a machine without a GPU: torch refuses to mix its tensors with those of the host.

Its tensors lie in the memory of the CPU. The operands of each function are checked as CUDA checks
them: a tensor of the host may be copied to the device and from it, may index a tensor of the
device, and may be a single number among operands of the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from loragate.core.machine import Machine

DEVICE = torch.device("privateuseone", 0)
_GET_DEVICE = Tensor.device.__get__
# which make no exception for a single number
_JOINS = (torch.cat, torch.stack)


class OnDevice(Tensor):
    # functions return plain tensors, which the mode marks
    __torch_function__ = torch._C._disabled_torch_function_impl


class SeparateMachine(Machine):
    """Has the device; kernels and streams are those of a machine without a GPU."""

    def __init__(self) -> None:
        super().__init__(DEVICE.type, "separate device", None, 1, 0)

    @property
    def interpreted(self) -> bool:
        return True


class HostGenerator(torch.Generator):
    """torch has no generator for the device."""

    def __new__(cls, device: object = "cpu") -> HostGenerator:
        return super().__new__(cls, "cpu" if _is_ours(device) else device)


class SeparateDevice(TorchFunctionMode):
    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func == _GET_DEVICE:
            return DEVICE if isinstance(args[0], OnDevice) else func(*args)
        if func is Tensor.cpu:
            return _moved(args[0], torch.device("cpu"))
        if func is Tensor.to:
            return _to(args, kwargs)
        on_device = [tensor for tensor in _tensors((args, kwargs)) if isinstance(tensor, OnDevice)]
        if on_device:
            _check_operands(func, args, kwargs)
        device = kwargs.get("device")
        if _is_ours(device):
            kwargs["device"] = "cpu"
        result = func(*args, **kwargs)
        if func is Tensor.copy_:
            return args[0]
        return _marked(result) if _is_ours(device) or (on_device and device is None) else result


def _to(args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor:
    """`Tensor.to`, which takes a device, a dtype or a tensor of both in any place."""
    tensor, *others = args
    device, rest = kwargs.pop("device", None), []
    for other in others:
        if isinstance(other, str | torch.device):
            device = other
        elif isinstance(other, Tensor):
            device = other.device if not isinstance(other, OnDevice) else DEVICE
            rest.append(other.dtype)
        else:
            rest.append(other)
    moved = tensor if device is None else _moved(tensor, torch.device(device))
    if not rest and not kwargs:
        return moved
    result = Tensor.to(moved, *rest, **kwargs)
    return _marked(result) if isinstance(moved, OnDevice) else result


def _moved(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy, or the tensor itself where it is there already."""
    if _is_ours(device) == isinstance(tensor, OnDevice):
        return tensor
    copy = tensor.clone().as_subclass(Tensor)
    return _marked(copy) if _is_ours(device) else copy


def _check_operands(
    func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> None:
    if func is Tensor.copy_:
        return
    operands: object = (args, kwargs)
    if func is Tensor.numpy:
        raise TypeError("a tensor of the device has no numpy array")
    if func in (Tensor.__getitem__, Tensor.__setitem__) and isinstance(args[0], OnDevice):
        # indices of the host are copied, and so is what is written to a slice
        has_index = any(True for _ in _tensors(args[1]))
        operands = args[2:] if has_index else ()
    most_dims = -1 if func in _JOINS else 0
    for tensor in _tensors(operands):
        if not isinstance(tensor, OnDevice) and tensor.dim() > most_dims:
            name = getattr(func, "__name__", func)
            raise RuntimeError(f"{name} of a tensor {[*tensor.shape]} of the host on the device")


def _tensors(value: object) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from _tensors(tuple(value.values()))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)


def _marked(result: Any) -> Any:
    if isinstance(result, Tensor):
        return result if isinstance(result, OnDevice) else result.as_subclass(OnDevice)
    if isinstance(result, list | tuple):
        marked = map(_marked, result)
        # named results of torch take one sequence
        return type(result)(marked) if not hasattr(result, "_fields") else type(result)(*marked)
    return result


def _is_ours(device: Any) -> bool:
    return device is not None and torch.device(device).type == DEVICE.type
