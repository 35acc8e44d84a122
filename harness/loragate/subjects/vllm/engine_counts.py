"""What an engine of vLLM does in its own process: replays of graphs, and launches of vLLM's kernels
of adapters. An engine that quietly does without either gives right answers, too."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from loragate.engine.launch_counts import LaunchCounts

# of `lora_shrink`, `lora_expand` and the two kernels of experts, in 0.26 to 0.33
_EXPAND = "_lora_expand"
VLLM_KERNELS = ("_lora_shrink", _EXPAND, "_fused_moe_lora")


def is_of_adapters(metadata: Any) -> bool:
    """Whether Triton launches one of vLLM's kernels of adapters; metadata: as its hooks get it."""
    return str(metadata.get()["name"]).startswith(VLLM_KERNELS)


def multiplies_with_a(metadata: Any) -> bool:
    """Whether one of vLLM's kernels of adapters is that of a linear layer or of experts. A
    vocabulary embedding looks up its rows of A, and launches the product with B alone."""
    return is_of_adapters(metadata) and not str(metadata.get()["name"]).startswith(_EXPAND)


@dataclass(slots=True)
class EngineEvents:
    """kernels: launches of vLLM's kernels of adapters."""

    replays: int = 0
    kernels: LaunchCounts = field(default_factory=LaunchCounts)

    def listen(self) -> None:
        """Count from now on, until the process ends."""
        # imported where it is used: a machine may have no Triton
        from triton import knobs

        replay = torch.cuda.CUDAGraph.replay

        def counted(graph: Any) -> None:
            self.replays += 1
            replay(graph)

        torch.cuda.CUDAGraph.replay = counted  # type: ignore[assignment, method-assign]
        knobs.runtime.launch_enter_hook.add(self._launched)

    def _launched(self, metadata: Any) -> None:
        if is_of_adapters(metadata):
            self.kernels.note()
