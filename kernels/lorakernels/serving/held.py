"""The tensors that a layer holds, found where they are and listed nowhere.

A graph reads more of a layer than its parameters: scales of quantised weights, tables that route to
experts, buffers of a base that the layer wraps. A list of them would have to grow with every layer.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

# objects of these modules keep tensors for a layer; slots, which are shared with others, do not
_OWN = "lorakernels.layers."


def held_tensors(layer: nn.Module) -> dict[str, Tensor]:
    """By name the tensors of a layer but those of its slots: parameters, buffers, and what layers
    of this package have in other attributes, also in lists and in objects of their own, which form
    no cycles. What a base of somebody else has in other attributes is left out: it may be of the
    last step alone."""
    found = {**dict(layer.named_parameters()), **dict(layer.named_buffers())}
    for path, module in layer.named_modules():
        found |= dict(_attributes(path, module))
    return found


def _attributes(path: str, owner: object) -> Iterator[tuple[str, Tensor]]:
    # a dataclass with slots, which has no such dict, holds sizes
    if type(owner).__module__.startswith(_OWN):
        for name, value in getattr(owner, "__dict__", {}).items():
            yield from _tensors(f"{path}.{name}" if path else name, value)


def _tensors(path: str, value: object) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, list | tuple):
        for index, part in enumerate(value):
            yield from _tensors(f"{path}.{index}", part)
    elif not isinstance(value, nn.Module):
        yield from _attributes(path, value)
