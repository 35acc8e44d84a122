"""Multi-LoRA kernels, adapters and layers, linear and MoE. Independent of the harness."""

from __future__ import annotations

from lorakernels.runtime import interpreter

interpreter.repair()
