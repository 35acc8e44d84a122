"""Another platform than CUDA, on which the plug-in does nothing: the engine stands in for it."""

from __future__ import annotations


class Platform:
    def is_cuda(self):
        return False


current_platform = Platform()
