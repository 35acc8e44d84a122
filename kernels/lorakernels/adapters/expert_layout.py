"""The layout of MoE factors in an adapter: pure rules on names and on axes of experts.

Invariant: an adapter has one layout in all of its layers. It is derived from all modules, not from
the first one that is found, so a file that mixes two layouts is refused as a whole.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import StrEnum

from lorakernels.adapters.errors import AdapterError, printable
from lorakernels.moe.weights import ExpertFactors, Factors

_NUMBERED = re.compile(r"(?:.*\.)?experts\.\d+\.[^.]+")
_STACKED = re.compile(r"(?:.*\.)?experts\.[^.\d][^.]*")
# the projections from the intermediate to the hidden size
_DOWN = ("down_proj", "w2")


class ExpertLayout(StrEnum):
    """PER_EXPERT: factors of two dimensions for each expert. STACKED: factors with an axis of
    experts. SHARED_OUTER: the same, but all experts share lora_A of gate and up and lora_B of
    down."""

    PER_EXPERT = "one module per expert"
    STACKED = "experts stacked in one module"
    SHARED_OUTER = "experts stacked, with shared outer factors"

    @property
    def stacked(self) -> bool:
        return self is not ExpertLayout.PER_EXPERT


def is_stacked_name(module: str) -> bool | None:
    """Whether a module's name stands for all experts or for one; None for other modules."""
    if _STACKED.fullmatch(module):
        return True
    return False if _NUMBERED.fullmatch(module) else None


def detect_layout(what: str, modules: Mapping[str, Factors]) -> ExpertLayout | None:
    """The layout of all experts in an adapter, None without any. AdapterError."""
    seen: dict[frozenset[ExpertLayout], str] = {}
    for module in sorted(modules):
        fitting = _fitting(what, module, modules[module])
        for other, witness in seen.items():
            if fitting and fitting.isdisjoint(other):
                raise AdapterError(
                    f"{what}: experts must have the same layout in all layers (got "
                    f"{printable(witness)}: {min(other)}; {printable(module)}: {min(fitting)})"
                )
        if fitting:
            seen.setdefault(fitting, module)
    common = frozenset(ExpertLayout).intersection(*seen) if seen else frozenset()
    return next((layout for layout in ExpertLayout if layout in common), None)


def _fitting(what: str, module: str, factors: Factors) -> frozenset[ExpertLayout]:
    if not isinstance(factors, ExpertFactors):
        numbered = is_stacked_name(module) is False
        return frozenset({ExpertLayout.PER_EXPERT} if numbered else ())
    a, b = factors.a.shape[0], factors.b.shape[0]
    if a == b:
        # factors that are shared on both sides fit any stack
        shared = {ExpertLayout.SHARED_OUTER} if a == 1 else set()
        return frozenset({ExpertLayout.STACKED} | shared)
    down = module.rpartition(".")[2] in _DOWN
    inner, outer = (a, b) if down else (b, a)
    if outer == 1:
        return frozenset({ExpertLayout.SHARED_OUTER})
    if inner == 1:
        side = "lora_B" if down else "lora_A"
        raise AdapterError(
            f"{what}: {printable(module)} may share {side} among its experts, no other factor"
        )
    raise AdapterError(
        f"{what}: {printable(module)} must have one number of experts (got {a} and {b})"
    )
