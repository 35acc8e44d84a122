"""Where an engine leaves its reference: the first module in the order of execution."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle


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

    def __str__(self) -> str:
        layer = "" if self.layer is None else f"layer {self.layer}: "
        return (
            f"the first module that leaves the reference is {layer}{self.module}, at token "
            f"{self.token} of the prompt and the answer: {self.error:.3g} off, {self.allowed:.3g} "
            "allowed"
        )


def traced(
    modules: Mapping[str, nn.Module], num_tokens: int, run: Callable[[], object]
) -> dict[str, Tensor]:
    """fp64 [tokens, values] of what these modules return in `run`, a pass of `num_tokens` tokens,
    and as NAME.input of what those without modules of their own read; in the order of execution.
    What has no row for each token is left out."""
    seen: dict[str, Tensor] = {}

    def record(name: str, value: Any) -> None:
        first = value[0] if isinstance(value, tuple) and value else value
        if isinstance(first, Tensor) and first.numel() % num_tokens == 0:
            seen[name] = first.detach().reshape(num_tokens, -1).to("cpu", torch.float64)

    def hooks_of(name: str, module: nn.Module) -> Iterator[RemovableHandle]:
        if not any(module.children()):
            yield module.register_forward_pre_hook(lambda _, given: record(f"{name}.input", given))
        yield module.register_forward_hook(lambda _, __, made: record(name, made))

    hooks = [hook for name, module in modules.items() for hook in hooks_of(name, module)]
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()
    return seen


def first_deviation(
    shown: Mapping[str, Tensor],
    exact: Mapping[str, Tensor],
    low: Mapping[str, Tensor],
    *,
    allowance: float,
    floor: float,
) -> Deviation | None:
    """exact, low: the traces of the reference in fp64 and in a low precision, in the order of
    execution; a module may be off by `allowance` times what these differ by, or by `floor` of its
    largest value where that is more: what is equal by chance may be rounded elsewhere. ValueError
    for names and shapes that the reference does not have."""
    for name, values in shown.items():
        if name not in exact:
            raise ValueError(f"the model has no module {name!r}")
        if values.shape != exact[name].shape:
            raise ValueError(f"{name} must be {list(exact[name].shape)} (got {list(values.shape)})")
    for name, wanted in exact.items():
        if name in shown:
            errors = (shown[name].to(wanted) - wanted).abs().nan_to_num(nan=float("inf"))
            noise = max((low[name] - wanted).abs().max(), floor * wanted.abs().max())
            allowed = allowance * float(noise)
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
