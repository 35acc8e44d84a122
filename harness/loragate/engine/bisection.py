"""Where an engine leaves its reference: the first module in the order of execution."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


class Trace(Protocol):
    """What an engine computes for `tokens` with an adapter, by the names of transformers:
    [tokens, values] of what a module returns (`model.layers.0.self_attn.k_proj`, a whole layer as
    `model.layers.0`), and of what a linear one reads (`model.layers.0.self_attn.o_proj.input`). An
    engine shows what it can: the modules between two that it shows cannot be told apart."""

    def __call__(self, tokens: Sequence[int], adapter: str | None) -> Mapping[str, Tensor]: ...


@dataclass(frozen=True, slots=True)
class Deviation:
    """layer: None outside of the layers. module: its name in the layer. token: the first one of
    which a value is too far off. error, allowed: of the worst value of the module."""

    layer: int | None
    module: str
    token: int
    error: float
    allowed: float


def first_deviation(
    shown: Mapping[str, Tensor],
    exact: Mapping[str, Tensor],
    low: Mapping[str, Tensor],
    *,
    allowance: float,
) -> Deviation | None:
    """exact, low: the traces of the reference in fp64 and in bf16, in the order of execution; a
    module may be off by `allowance` times what these differ by. ValueError for names and shapes
    that the reference does not have."""
    for name, values in shown.items():
        if name not in exact:
            raise ValueError(f"the model has no module {name!r}")
        if values.shape != exact[name].shape:
            raise ValueError(f"{name} must be {list(exact[name].shape)} (got {list(values.shape)})")
    for name, wanted in exact.items():
        if name in shown:
            errors = (shown[name].to(wanted) - wanted).abs().nan_to_num(nan=float("inf"))
            allowed = allowance * float((low[name] - wanted).abs().max())
            far = (errors > allowed).any(dim=1)
            if far.any():
                layer, module = _place(name)
                return Deviation(
                    layer, module, int(far.int().argmax()), float(errors.max()), allowed
                )
    return None


def _place(name: str) -> tuple[int | None, str]:
    if found := re.fullmatch(r"model\.layers\.(\d+)\.?(.*)", name):
        return int(found[1]), found[2] or "the whole layer"
    return None, name
