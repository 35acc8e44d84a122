"""Every probe of the installed vLLM, by name."""

from __future__ import annotations

from types import MappingProxyType

import torch

from loragate.findings.ledger import Needs, Observation, Seen
from loragate.findings.probing import Package
from loragate.findings.vllm_dense_probes import DENSE_PROBES
from loragate.findings.vllm_moe_gpu_probes import MOE_GPU_PROBES
from loragate.findings.vllm_moe_probes import MOE_PROBES

PROBES = MappingProxyType({**DENSE_PROBES, **MOE_PROBES, **MOE_GPU_PROBES})


def observe(name: str, package: Package, device: str) -> Observation:
    """Run one probe on `device`; an exception becomes an observation as well."""
    probe = PROBES[name]
    if probe.needs is Needs.CUDA and device != "cuda":
        return Observation(Seen.NOT_TRIED, "needs a GPU")
    try:
        return probe.run(package, device)
    except (MemoryError, torch.OutOfMemoryError) as error:
        return Observation(Seen.NOT_TRIED, f"needs more memory: {error}")
    except Exception as error:
        return Observation(Seen.BROKEN, f"{type(error).__name__}: {error}")
