"""Every probe of the installed vLLM, by name."""

from __future__ import annotations

from types import MappingProxyType

import torch

from loragate.findings.ledger import Needs, Observation, Seen
from loragate.findings.probing import Package, Probe
from loragate.findings.vllm_adapter_probes import ADAPTER_PROBES
from loragate.findings.vllm_dense_probes import DENSE_PROBES
from loragate.findings.vllm_far_probes import FAR_PROBES
from loragate.findings.vllm_head_probes import HEAD_PROBES
from loragate.findings.vllm_layer_probes import LAYER_PROBES
from loragate.findings.vllm_moe_gpu_probes import MOE_GPU_PROBES
from loragate.findings.vllm_moe_probes import MOE_PROBES
from loragate.findings.vllm_scheduling_probes import SCHEDULING_PROBES
from loragate.findings.vllm_tower_probes import TOWER_PROBES

PROBES = MappingProxyType(
    {
        **DENSE_PROBES,
        **LAYER_PROBES,
        **ADAPTER_PROBES,
        **HEAD_PROBES,
        **TOWER_PROBES,
        **SCHEDULING_PROBES,
        **FAR_PROBES,
        **MOE_PROBES,
        **MOE_GPU_PROBES,
    }
)


def observe(name: str, package: Package, device: str) -> Observation:
    """Run one probe on `device`; an exception becomes an observation as well."""
    probe = PROBES[name]
    if probe.needs is Needs.CUDA and device != "cuda":
        return Observation(Seen.NOT_TRIED, "needs a GPU")
    try:
        return _lacking_memory(probe, device) or _run(probe, package, device)
    except (MemoryError, torch.OutOfMemoryError) as error:
        return Observation(Seen.NOT_TRIED, f"needs more memory: {error}")
    except ModuleNotFoundError as error:
        # a module that it lacks itself is a change of the package
        is_own = (error.name or "").partition(".")[0] == "vllm"
        return Observation(Seen.BROKEN if is_own else Seen.NOT_TRIED, f"{error}")
    except Exception as error:
        return Observation(Seen.BROKEN, f"{type(error).__name__}: {error}")


def _run(probe: Probe, package: Package, device: str) -> Observation:
    observation = probe.run(package, device)
    if device == "cuda":
        # an error in a kernel shows late; it belongs to the probe that launched the kernel
        torch.cuda.synchronize()
    return observation


def _lacking_memory(probe: Probe, device: str) -> Observation | None:
    if not probe.free_gib or device != "cuda":
        return None
    free = torch.cuda.mem_get_info()[0] / 2**30
    if free >= probe.free_gib:
        return None
    text = f"needs {probe.free_gib} GiB of free GPU memory, {free:.1f} GiB are free"
    return Observation(Seen.NOT_TRIED, text)
