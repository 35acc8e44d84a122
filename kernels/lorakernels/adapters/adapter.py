"""One adapter as it was trained: full factors for each module of the base model.

Invariant: nobody writes to these tensors. Cutting, padding, casting and scaling happen on
copies, so an adapter can be activated any number of times (vllm #20873).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from lorakernels.adapters.peft_config import TargetRule
from lorakernels.dense.weights import LoRAFactors


@dataclass(frozen=True, slots=True)
class Adapter:
    """`modules` maps a module's name in the base model, such as
    "model.layers.0.self_attn.q_proj", to its factors: a [r, in], b [out, r], scale.

    `targets` tells which modules should have factors; None if that is not known, as for an
    adapter that was not read from a PEFT folder.
    """

    name: str
    modules: Mapping[str, LoRAFactors]
    targets: TargetRule | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "modules", MappingProxyType(dict(self.modules)))
