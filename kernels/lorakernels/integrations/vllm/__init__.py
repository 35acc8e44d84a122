"""LoRA of vLLM with the kernels of this package, as a plug-in of vLLM; see docs/vllm.md.

vLLM calls `register` by the entry point `vllm.general_plugins`. Nothing here imports vLLM before
that.
"""

from lorakernels.integrations.vllm.launches import LaunchCounts, launch_counts, reset_launch_counts
from lorakernels.integrations.vllm.registration import SWITCH, UnsupportedVllmError, register

__all__ = [
    "SWITCH",
    "LaunchCounts",
    "UnsupportedVllmError",
    "launch_counts",
    "register",
    "reset_launch_counts",
]
