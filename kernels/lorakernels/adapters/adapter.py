"""One adapter as it was trained: full factors for each module of the base model.

Invariant: these tensors are never written to. Cutting, padding, casting and scaling happen on
copies, so an adapter can be activated any number of times (vllm #20873). Its experts have the same
layout in all layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from lorakernels.adapters.errors import AdapterError, printable
from lorakernels.adapters.expert_layout import ExpertLayout, detect_layout
from lorakernels.adapters.peft_targets import TargetRule
from lorakernels.moe.weights import Factors


@dataclass(frozen=True, slots=True)
class Adapter:
    """`modules` maps a module's name in the base model, such as
    "model.layers.0.self_attn.q_proj", to its factors: a [r, in], b [out, r], scale. Experts
    are modules of their own, "model.layers.0.mlp.experts.7.up_proj", or stacked factors of
    one module for all of them, "model.layers.0.mlp.experts.up_proj".

    `targets` is the rule for which modules should have factors; None if it is not known, as for an
    adapter that was not read from a PEFT folder. Raises AdapterError.
    """

    name: str
    modules: Mapping[str, Factors]
    targets: TargetRule | None = None
    expert_layout: ExpertLayout | None = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "modules", MappingProxyType(dict(self.modules)))
        for module, factors in self.modules.items():
            # a layer would take None for a module without an adapter
            if not isinstance(factors, Factors):
                raise AdapterError(
                    f"adapter {printable(self.name)}: {printable(module)} must have LoRAFactors or "
                    f"ExpertFactors (got {printable(factors)})"
                )
        layout = detect_layout(f"adapter {printable(self.name)}", self.modules)
        object.__setattr__(self, "expert_layout", layout)
