"""How often kernels of adapters are launched, outside of captures and in one."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(slots=True)
class LaunchCounts:
    launched: int = 0
    captured: int = 0

    def note(self) -> None:
        """A launch on the current stream of a GPU. A replay of a graph is none."""
        if torch.cuda.is_current_stream_capturing():
            self.captured += 1
        else:
            self.launched += 1
