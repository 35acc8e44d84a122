"""The corpus: every fault, every control, and the slice that each test run plants."""

from __future__ import annotations

from loragate.faults.corpus import (
    adapters,
    device,
    expand,
    layers,
    metadata,
    moe_align,
    moe_fused,
    moe_host,
    moe_two_kernel,
    operator,
    shrink,
    weights,
)
from loragate.faults.corpus.controls import CONTROLS
from loragate.faults.model import Fault, Needs

FAULTS: tuple[Fault, ...] = (
    *metadata.FAULTS,
    *shrink.FAULTS,
    *expand.FAULTS,
    *operator.FAULTS,
    *weights.FAULTS,
    *layers.FAULTS,
    *adapters.FAULTS,
    *device.FAULTS,
    *moe_align.FAULTS,
    *moe_two_kernel.FAULTS,
    *moe_fused.FAULTS,
    *moe_host.FAULTS,
)

# what every test run plants: for each oracle the fault that only it notices
SLICE = tuple(fault for fault in FAULTS if fault.only and fault.needs is Needs.CPU)
SLICE_CONTROLS = CONTROLS[:1]

__all__ = ["CONTROLS", "FAULTS", "SLICE", "SLICE_CONTROLS"]
