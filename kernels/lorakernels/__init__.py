"""Multi-LoRA kernels, adapters and layers, for linear and MoE layers. Independent of the harness."""

from __future__ import annotations

import os

if os.environ.get("TRITON_INTERPRET") == "1":
    from lorakernels.runtime import interpreter

    interpreter.repair()
