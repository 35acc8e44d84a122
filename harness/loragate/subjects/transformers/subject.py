"""transformers with PEFT: what most people compare an engine with. It serves whole models only."""

from __future__ import annotations

from importlib import metadata
from importlib.util import find_spec

from loragate.core.machine import Machine
from loragate.matrix.case import Case, Dtype, Execution, Site
from loragate.matrix.engine_case import (
    Active,
    Ends,
    Logprobs,
    Model,
    Requests,
    Speculation,
    Targets,
    Weights,
)
from loragate.protocol import AnyInstance, BaseLayer, Capabilities

_PACKAGES = ("transformers", "peft")
# of PEFT: what puts the adapters of single experts into a model that stores experts in one tensor
_EXPERT_ADAPTERS = "peft.utils.transformers_weight_conversion"
_MAX_RANK = 512


class TransformersSubject:
    name = "transformers"

    def version(self) -> str:
        return ", ".join(f"{name} {metadata.version(name)}" for name in _PACKAGES)

    def capabilities(self, machine: Machine) -> Capabilities | str:
        missing = [name for name in _PACKAGES if find_spec(name) is None]
        if missing:
            return f"{' and '.join(missing)} is not installed"
        return Capabilities(
            sites=frozenset({Site.ENGINE}),
            supports={
                "dtype": frozenset(Dtype),
                "execution": frozenset({Execution.EAGER}),
                "rank": range(1, _MAX_RANK + 1),
                "model": frozenset(Model if find_spec(_EXPERT_ADAPTERS) else {Model.DENSE}),
                "speculation": frozenset(
                    {Speculation.NONE, Speculation.NGRAM, Speculation.DRAFT_MODEL}
                ),
                "active": frozenset(Active),
                "targets": frozenset(Targets),
                "weights": frozenset(Weights),
                "logprobs": frozenset(Logprobs),
                # one after the other in any case
                "requests": frozenset(Requests),
                "ends": frozenset(Ends),
            },
            refuses=_refuses,
        )

    def engine_target(self, case: Case) -> str:
        return "loragate.subjects.transformers.engine:TransformersEngine"

    def open(self, case: Case, machine: Machine, base: BaseLayer | None) -> AnyInstance:
        raise AssertionError("transformers serves whole models only")


def _refuses(case: Case) -> str | None:
    if case.model is Model.HYBRID and case.speculation is not Speculation.NONE:
        return "transformers verifies no drafts for a model with a state that cannot be taken back"
    return None
