"""What a GPU offers beyond the common: asked in one place."""

from __future__ import annotations

from functools import cache

import torch
from triton.runtime.jit import JITFunction

from lorakernels.batch.kernel import prepare_kernel


@cache
def supports_pdl(device: torch.device) -> bool:
    """Programmatic dependent launch: a kernel starts while the one before still runs. Safe
    where nothing can come between the two launches (vllm #31777)."""
    # the interpreter knows nothing of it, and takes tensors of a GPU, too
    compiled = isinstance(prepare_kernel, JITFunction)
    on_gpu = compiled and device.type == "cuda"
    return on_gpu and torch.cuda.get_device_capability(device) >= (9, 0)


def launch_options(pdl: bool) -> dict[str, bool]:
    # the interpreter does not know the option
    return {"launch_pdl": True} if pdl else {}
