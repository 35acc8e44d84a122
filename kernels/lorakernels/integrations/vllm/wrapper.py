"""The class that vLLM finds by its name in place of its own. Importing this imports vLLM."""

from __future__ import annotations

from typing import Any

from vllm.config.vllm import get_current_vllm_config_or_none
from vllm.lora.punica_wrapper.punica_gpu import PunicaWrapperGPU

from lorakernels.integrations.vllm.adoption import refusal_of_server
from lorakernels.integrations.vllm.methods import LoraKernelsMethods


class LoraKernelsWrapper(LoraKernelsMethods, PunicaWrapperGPU):  # type: ignore[misc]
    """vLLM's wrapper, whose layers run these kernels."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # there is a configuration while vLLM loads a model
        self.refusal = refusal_of_server(get_current_vllm_config_or_none())
