"""Multi-LoRA kernels of linear layers and of experts, adapters and layers. Knows nothing of the
harness."""

from __future__ import annotations

import os

if os.environ.get("TRITON_INTERPRET") == "1":
    from lorakernels.runtime import interpreter

    interpreter.repair()
