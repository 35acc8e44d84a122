"""The class that vLLM finds by its name in place of its own. Importing this imports vLLM."""

from __future__ import annotations

from vllm.lora.punica_wrapper.punica_gpu import PunicaWrapperGPU

from lorakernels.integrations.vllm.methods import LoraKernelsMethods


class LoraKernelsWrapper(LoraKernelsMethods, PunicaWrapperGPU):  # type: ignore[misc]
    """vLLM's wrapper, whose layers run these kernels."""
