"""Subject `vllm_lorakernels`: the installed vLLM, whose adapters are computed by lorakernels."""

from __future__ import annotations

from importlib.util import find_spec

from loragate.core.machine import Machine
from loragate.matrix.case import Case, Dtype, Execution, Site, Streams
from loragate.protocol import AnyInstance, BaseLayer, Capabilities
from loragate.subjects.vllm.engine_arguments import ENGINE_SUPPORTS, NEEDS_GPU
from loragate.subjects.vllm.package import installed_version

_PLUGIN = "lorakernels.integrations"
_MAX_RANK = 512


class VllmWithPlugin:
    name = "vllm_lorakernels"

    def version(self) -> str:
        return installed_version() or "not installed"

    def capabilities(self, machine: Machine) -> Capabilities | str:
        if installed_version() is None:
            return "vllm is not installed"
        if machine.interpreted:
            return NEEDS_GPU
        if find_spec(_PLUGIN) is None:
            return f"there is no {_PLUGIN}.vllm"
        return Capabilities(
            sites=frozenset({Site.ENGINE}),
            supports={
                **ENGINE_SUPPORTS,
                "dtype": frozenset({Dtype.FP16, Dtype.BF16}),
                "execution": frozenset(Execution),
                "rank": range(1, _MAX_RANK + 1),
                "streams": frozenset(Streams),
            },
        )

    def engine_target(self, case: Case) -> str:
        return "loragate.subjects.vllm.engine:with_plugin"

    def open(self, case: Case, machine: Machine, base: BaseLayer | None) -> AnyInstance:
        raise AssertionError("the plug-in is judged in whole models only")
