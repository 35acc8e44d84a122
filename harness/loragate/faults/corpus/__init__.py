"""The corpus: every fault, every control, and the slice that each test run plants."""

from __future__ import annotations

from loragate.faults.corpus import (
    adapters,
    controls,
    dependents,
    device,
    embedding,
    expand,
    gdn,
    graphs,
    hot_path,
    layers,
    metadata,
    moe_adapters,
    moe_align,
    moe_controls,
    moe_device,
    moe_fused,
    moe_gates,
    moe_host,
    moe_layer,
    moe_parts,
    moe_places,
    moe_streams,
    moe_two_kernel,
    new_oracles,
    one_plan,
    operator,
    plug_in,
    prepared,
    serving_decoder,
    serving_drafts,
    serving_graphs,
    sharding,
    shrink,
    stored,
    streams,
    streams_of_linear,
    weights,
)
from loragate.faults.model import Control, Fault, Needs
from loragate.matrix.engine_case import ENGINE_ORACLES

FAULTS: tuple[Fault, ...] = (
    *metadata.FAULTS,
    *shrink.FAULTS,
    *expand.FAULTS,
    *operator.FAULTS,
    *weights.FAULTS,
    *layers.FAULTS,
    *embedding.FAULTS,
    *adapters.FAULTS,
    *dependents.FAULTS,
    *device.FAULTS,
    *moe_align.FAULTS,
    *moe_two_kernel.FAULTS,
    *moe_fused.FAULTS,
    *moe_host.FAULTS,
    *moe_layer.FAULTS,
    *moe_parts.FAULTS,
    *moe_gates.FAULTS,
    *moe_places.FAULTS,
    *moe_adapters.FAULTS,
    *moe_device.FAULTS,
    *new_oracles.FAULTS,
    *one_plan.FAULTS,
    *hot_path.FAULTS,
    *prepared.FAULTS,
    *graphs.FAULTS,
    *streams.FAULTS,
    *streams_of_linear.FAULTS,
    *stored.FAULTS,
    *gdn.FAULTS,
    *moe_streams.FAULTS,
    *serving_decoder.FAULTS,
    *serving_graphs.FAULTS,
    *plug_in.FAULTS,
    *serving_drafts.FAULTS,
    *sharding.FAULTS,
)

CONTROLS: tuple[Control, ...] = (*controls.CONTROLS, *moe_controls.CONTROLS)

# what every test run plants: for each oracle a fault of a linear layer and one of a MoE layer
# that only this oracle detects
_ONLY = [fault for fault in FAULTS if fault.only and fault.needs is Needs.CPU]
ALONE = tuple(fault for fault in _ONLY if fault.killers[0].by not in ENGINE_ORACLES)
# the same for whole models; an engine takes too long to be planted in every test run
ALONE_IN_ENGINES = tuple(fault for fault in _ONLY if fault not in ALONE)
SLICE_CONTROLS = CONTROLS[:1]

__all__ = ["ALONE", "ALONE_IN_ENGINES", "CONTROLS", "FAULTS", "SLICE_CONTROLS"]
