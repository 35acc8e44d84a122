"""Multi-LoRA kernels, adapters and layers, linear and MoE. Independent of the harness."""

from __future__ import annotations

import os

if os.environ.get("TRITON_INTERPRET") == "1":
    from lorakernels.runtime import interpreter

    interpreter.repair()
