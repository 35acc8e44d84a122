"""What an engine of vLLM does in its own process: replays of graphs, and launches of vLLM's kernels
of adapters. An engine that quietly does without either gives right answers, too."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from loragate.engine.launch_counts import LaunchCounts

_EXPAND = "_lora_expand"
# of `lora_shrink`, `lora_expand` and the two kernels of experts, in 0.26 to 0.33
VLLM_KERNELS = ("_lora_shrink", _EXPAND, "_fused_moe_lora")


@dataclass(slots=True)
class AdapterLaunches(LaunchCounts):
    """Of vLLM's kernels of adapters. of_layers: those of linear layers and of experts. A vocabulary
    embedding looks up its rows of A, and launches the product with B alone."""

    of_layers: LaunchCounts = field(default_factory=LaunchCounts)

    def hook(self, metadata: Any) -> None:
        """A hook of Triton, called before each launch."""
        name = str(metadata.get()["name"])
        if not name.startswith(VLLM_KERNELS):
            return
        self.note()
        if not name.startswith(_EXPAND):
            self.of_layers.note()


@dataclass(slots=True)
class EngineEvents:
    replays: int = 0
    kernels: AdapterLaunches = field(default_factory=AdapterLaunches)

    def listen(self) -> None:
        """Count from now on, until the process ends."""
        # imported where it is used: a machine may have no Triton
        from triton import knobs

        replay = torch.cuda.CUDAGraph.replay

        def counted(graph: Any) -> None:
            self.replays += 1
            replay(graph)

        torch.cuda.CUDAGraph.replay = counted  # type: ignore[assignment, method-assign]
        knobs.runtime.launch_enter_hook.add(self.kernels.hook)
