"""Building blocks of probes.

A probe gives evidence either way and decides nothing; the ledger says what must reproduce.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from loragate.findings.ledger import Needs, Observation, Seen
from loragate.subjects.vllm.layer_package import VllmLayers
from loragate.subjects.vllm.moe_package import VllmMoEOps
from loragate.subjects.vllm.package import VllmOps


@dataclass(frozen=True, slots=True)
class Package:
    """The installed package; `moe` and `layers` are the reason, as a sentence, where they cannot
    run."""

    dense: VllmOps
    moe: VllmMoEOps | str
    layers: VllmLayers | str


@dataclass(frozen=True, slots=True)
class Probe:
    """`free_gib`: the GPU memory that it takes. `wild`: it provokes accesses to wrong addresses,
    so it runs apart from the ordinary ones."""

    needs: Needs
    run: Callable[[Package, str], Observation]
    free_gib: int = 0
    wild: bool = False


def dense_probe(
    run: Callable[[VllmOps, str], Observation],
    needs: Needs = Needs.ANY,
    *,
    free_gib: int = 0,
    wild: bool = False,
) -> Probe:
    """A probe of the dense operators; the string is the device."""
    return Probe(needs, lambda package, device: run(package.dense, device), free_gib, wild)


def moe_probe(
    run: Callable[[VllmMoEOps, str], Observation], needs: Needs = Needs.ANY, *, wild: bool = False
) -> Probe:
    """A probe of MoE LoRA, not tried where that cannot run."""

    def on_moe(package: Package, device: str) -> Observation:
        if isinstance(package.moe, str):
            return Observation(Seen.NOT_TRIED, package.moe)
        return run(package.moe, device)

    return Probe(needs, on_moe, wild=wild)


def layer_probe(run: Callable[[VllmLayers, str], Observation]) -> Probe:
    """A probe of the layers, not tried where they cannot run."""

    def on_layers(package: Package, device: str) -> Observation:
        if isinstance(package.layers, str):
            return Observation(Seen.NOT_TRIED, package.layers)
        return run(package.layers, device)

    return Probe(Needs.ANY, on_layers)


def seen(reproduced: bool, text: str) -> Observation:
    return Observation(Seen.REPRODUCED if reproduced else Seen.ABSENT, text)


def values_of(tensor: Tensor) -> list[float]:
    """The distinct values of a tensor, sorted."""
    return sorted(set(tensor.flatten().tolist()))


def untouched(elements: int, device: str) -> Tensor:
    """fp16 zeros; on a CPU no page of memory is committed before it is written."""
    if device == "cpu":
        return torch.from_numpy(np.zeros(elements, dtype=np.float16))
    return torch.zeros(elements, dtype=torch.float16, device=device)


def right_or_wrong(right: bool) -> str:
    return "right" if right else "wrong"
