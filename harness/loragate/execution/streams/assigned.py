"""Numbers that are assigned to a part of a tensor, as in `t[:2] = 0`.

torch makes a tensor of such a number, for the one operator that writes it. Beside a GPU that tensor
is in memory of the host, and the operator takes its value or uploads it. Without a GPU it looks
like a buffer of the device that is a new one in each step. Tensors that a subject makes of numbers
itself, and numbers that other operators get, are none of these.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

_assign = Tensor.__setitem__
# by operator: which argument the number is
_PLACES = {"lift_fresh": 0, "copy_": 1, "fill_": 1, "index_put_": 2}


class _State:
    is_assigning = False


@contextmanager
def noticed_numbers() -> Iterator[None]:
    """Within, `assigned_number` knows of them."""
    with patch.object(Tensor, "__setitem__", _noticed):
        yield


def assigned_number(func: Any, args: tuple[Any, ...]) -> Tensor | None:
    """The number among the arguments of an operator, if that is a part of such an assignment."""
    place = _PLACES.get(func.overloadpacket.__name__)
    if not _State.is_assigning or place is None or place >= len(args):
        return None
    value = args[place]
    # a list as an index becomes a tensor on the way as well
    return value if isinstance(value, Tensor) and value.dim() == 0 else None


def is_uploaded(name: str, args: tuple[Any, ...]) -> bool:
    """Whether the host waits until an operator has a copy of the number on a GPU. One that fills
    takes the value, and so does one that has a mask as its only index."""
    if name != "index_put_":
        return name == "copy_"
    indices = [index for index in args[1] if index is not None]
    return len(indices) != 1 or indices[0].dtype not in (torch.bool, torch.uint8)


def _noticed(tensor: Tensor, key: Any, value: Any) -> None:
    before, _State.is_assigning = _State.is_assigning, not isinstance(value, Tensor)
    try:
        _assign(tensor, key, value)
    finally:
        _State.is_assigning = before
