"""A rank's part of the base weights of a gated delta net's input, each of them of 8 bits or not.

Invariant: the whole weights are checked against each other before anything is cut.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lorakernels.common.quantised import Quantised, check_8_bit
from lorakernels.layers.moe_weights import Weight, values_of
from lorakernels.layers.packing import take_packed
from lorakernels.layers.partition import Shard, Slice


def check_weights(weights: dict[str, tuple[Weight, int]]) -> None:
    """`weights`: by name a weight and its number of rows, that of qkvz first. ValueError."""
    (first, _), (second, _) = weights.values()
    in_features = values_of(first).shape[-1]
    for name, (weight, rows) in weights.items():
        values = values_of(weight)
        if values.dim() != 2 or values.shape != (rows, in_features):
            raise ValueError(
                f"{name} must be [{rows}, {in_features}], as its modules add up and qkvz says "
                f"(got {list(values.shape)})"
            )
        if isinstance(weight, Quantised):
            _check_quantised(name, weight)
    one, other = values_of(first), values_of(second)
    are_plain = not isinstance(first, Quantised) and not isinstance(second, Quantised)
    if one.device != other.device or (are_plain and one.dtype != other.dtype):
        raise ValueError(
            f"qkvz and ba must have one dtype and one device (got {one.dtype} on {one.device} "
            f"and {other.dtype} on {other.device})"
        )


def input_dtype(weights: Sequence[Weight], dtype: torch.dtype | None) -> torch.dtype:
    """The dtype of the input and the adapters: that of the weights that are not quantised, or the
    given one. ValueError."""
    plain = [weight.dtype for weight in weights if isinstance(weight, Tensor)]
    if dtype is None and not plain:
        raise ValueError("dtype must be given where qkvz and ba are quantised (got None)")
    if dtype is not None and plain and dtype != plain[0]:
        raise ValueError(f"dtype must be {plain[0]} like the weights (got {dtype})")
    return plain[0] if dtype is None else dtype


def take_rows(weight: Weight, slices: Sequence[Slice], shards: Sequence[Shard]) -> Weight:
    """The rows that the shards hold, each slice cut separately, with a scale for each of them."""
    values = take_packed(values_of(weight), slices, shards)
    if isinstance(weight, Tensor):
        return values
    scales = weight.scales.detach().expand(len(values_of(weight)))
    return Quantised(values, take_packed(scales, slices, shards).contiguous())


def joined(first: Weight, second: Weight) -> tuple[Weight, ...]:
    """One weight with the rows of both where they have one format, else a copy of each."""
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        return (torch.cat([first, second]),)
    if isinstance(first, Quantised) and isinstance(second, Quantised):
        values = torch.cat([first.values, second.values])
        return (Quantised(values, torch.cat([first.scales, second.scales])),)
    return tuple(_copied(weight) for weight in (first, second))


def _copied(weight: Weight) -> Weight:
    values = values_of(weight).clone(memory_format=torch.contiguous_format)
    return values if isinstance(weight, Tensor) else Quantised(values, weight.scales.clone())


def _check_quantised(name: str, weight: Quantised) -> None:
    values, scales = weight.values, weight.scales
    check_8_bit(name, weight)
    if scales.dtype != torch.float32 or list(scales.shape) not in ([], [1], [len(values)]):
        raise ValueError(
            f"scales of {name} must be torch.float32 of 1 or {len(values)} rows "
            f"(got {scales.dtype} of shape {list(scales.shape)})"
        )
    if scales.device != values.device:
        raise ValueError(f"scales of {name} must be on {values.device} (got {scales.device})")
