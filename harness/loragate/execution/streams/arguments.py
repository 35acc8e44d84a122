"""The arguments of a Triton launch, compiled or interpreted."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves


def tensors_of(
    names: Sequence[str], args: Sequence[Any], options: Mapping[str, Any]
) -> list[tuple[str, Tensor]]:
    """The tensors among the arguments, those in tuples as well, in the order of the kernel."""
    given = {**dict(zip(names, args, strict=False)), **options}
    found = []
    for name in names:
        for leaf in tree_leaves(given.get(name)):
            # a descriptor may stand for a tensor that is taken for one of another dtype
            while not isinstance(leaf, Tensor) and hasattr(leaf, "base"):
                leaf = leaf.base
            if isinstance(leaf, Tensor):
                found.append((name, leaf))
    return found


def holders(
    names: Sequence[str],
    args: Sequence[Any],
    options: Mapping[str, Any],
    addresses: Iterable[int],
) -> set[str]:
    """The arguments from which a kernel got addresses: to each of them belongs the one with the
    nearest integer at or below it, as its value or, if it is a tensor, among its elements."""
    held = held_integers(names, args, options)
    below = ([one for one in held if one[0] <= address] for address in addresses)
    return {max(found)[1] if found else "none of its arguments" for found in below}


def held_integers(
    names: Sequence[str], args: Sequence[Any], options: Mapping[str, Any]
) -> list[tuple[int, str]]:
    """The integers that a kernel could take for addresses, each with the name of its argument."""
    held: list[tuple[int, str]] = []
    for name, value in {**dict(zip(names, args, strict=False)), **options}.items():
        if isinstance(value, int) and name in names:
            held.append((value, name))
    for name, tensor in tensors_of(names, args, options):
        if tensor.dtype in (torch.int64, torch.uint64):
            held += [(value, name) for value in tensor.flatten().tolist()]
    return held
