"""ATen operators: what one uses, whether the host waits for it, and how it is done again."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from loragate.execution.streams.assigned import assigned_number, is_uploaded

# operators whose result the host has to wait for; within a custom operator some have other names
_READ_BY_HOST = frozenset(
    {
        *("_local_scalar_dense", "item", "is_nonzero", "nonzero", "masked_select", "equal"),
        *("_unique2", "unique_dim", "unique_consecutive", "bincount"),
    }
)
# under which a kernel for tensors of a device is registered
_KEYS_OF_KERNELS = ("CPU", "CUDA", "CompositeExplicitAutograd", "CompositeImplicitAutograd")
_INDEXED = frozenset({"index", "index_put", "index_put_", "_unsafe_index"})


class Again:
    """An operator that is called once more and leaves its results in the same memory."""

    def __init__(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        outputs: list[Tensor],
        fresh: list[Tensor],
    ) -> None:
        self._func, self._args, self._kwargs = func, args, kwargs
        self._outputs, self._fresh = outputs, {id(tensor) for tensor in fresh}

    def __call__(self) -> None:
        again = tree_leaves(self._func(*self._args, **self._kwargs))
        tensors = [leaf for leaf in again if isinstance(leaf, Tensor)]
        for new, old in zip(tensors, self._outputs, strict=True):
            if id(old) in self._fresh:
                old.copy_(new)


def used_by(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterator[tuple[Tensor, bool, str]]:
    """Tensors among the arguments, whether the schema says that they are written, their names. An
    assigned number is none of them: it is no memory of a device."""
    number = assigned_number(func, args)
    for position, argument in enumerate(func._schema.arguments):
        if position < len(args):
            value = args[position]
        elif argument.name in kwargs:
            value = kwargs[argument.name]
        else:
            continue
        is_write = argument.alias_info is not None and argument.alias_info.is_write
        for leaf in tree_leaves(value):
            if isinstance(leaf, Tensor) and leaf is not number:
                yield leaf, is_write, ""


def host_waits(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[Tensor]
) -> bool:
    """Whether the host waits for the device in an operator, whose tensors are given."""
    name = func.overloadpacket.__name__
    if assigned_number(func, args) is not None:
        return is_uploaded(name, args)
    if name in _READ_BY_HOST or (name in _INDEXED and _has_mask(args)):
        return True
    # a copy from or to the host
    if len({tensor.device.type for tensor in tensors}) < 2:
        return False
    is_queued = kwargs.get("non_blocking", False) or args[2:3] == (True,)
    return name in ("copy_", "_to_copy") and not is_queued


def is_written_in_python(func: Any) -> bool:
    """Whether what an operator of a library does is seen, because Python calls it."""
    name = f"{func.namespace}/{func.overloadpacket.__name__}"
    # of torch.library.custom_op and of Library.impl alike
    return any(f"{name}/{key}" in torch.library._impls for key in _KEYS_OF_KERNELS)


def backend_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The dispatch keys by which the tensors among the arguments reach a kernel."""
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    on_gpu = any(tensor.is_cuda for tensor in tensors)
    key = torch._C.DispatchKey.CUDA if on_gpu else torch._C.DispatchKey.CPU
    return torch._C.DispatchKeySet(key)


def _has_mask(args: tuple[Any, ...]) -> bool:
    indices = args[1] if len(args) > 1 else ()
    return any(isinstance(i, Tensor) and i.dtype in (torch.bool, torch.uint8) for i in indices)
