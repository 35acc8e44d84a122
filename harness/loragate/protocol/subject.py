"""An implementation under test: a Subject opens instances, an instance runs steps."""

from __future__ import annotations

from typing import Protocol, TypeAlias, cast

from torch import Tensor

from loragate.core.machine import Machine
from loragate.matrix.case import Case
from loragate.protocol.capabilities import Capabilities
from loragate.protocol.tensors import BaseLayer, Batch, Pool, Routes


class Resident(Protocol):
    """One resident pool of adapters; its state lives from step to step, as in a server."""

    def load(self, slot: int, pool: Pool) -> None:
        """Put adapter `slot` of `pool` into the slot of that number, replacing what was there."""

    def unload(self, slot: int) -> None:
        """Empty a slot, whether it has an adapter or not."""

    def prepare(self, token_slots: Tensor) -> None:
        """Once a step: which token uses which slot. May sync, is never captured."""


class Instance(Resident, Protocol):
    def apply(self, x: Tensor, out: Tensor) -> Tensor:
        """The operation itself. dense_delta adds to `out` in place and returns it;
        lora_linear, gdn_in_proj and embedding ignore `out` and return a new tensor, that of
        gdn_in_proj with the columns of all slices beside each other. Never syncs."""


class MoEInstance(Resident, Protocol):
    def apply(self, x: Tensor, out: Tensor, routes: Routes) -> Tensor:
        """The operation itself, including the alignment of token-expert pairs: a server captures
        both. Never syncs.

        moe_delta adds to `out` in place, or stores (case.write), and returns it. A pair without a
        delta keeps its bits: base rows, experts that are not here, and slices that the adapter
        does not have. moe_layer ignores `out` and returns a new tensor."""


AnyInstance: TypeAlias = Instance | MoEInstance


def apply_step(instance: AnyInstance, batch: Batch) -> Tensor:
    """Run a prepared step."""
    if batch.routes is None:
        return cast(Instance, instance).apply(batch.x, batch.out)
    return cast(MoEInstance, instance).apply(batch.x, batch.out, batch.routes)


class EngineSubject(Protocol):
    """What a subject of site engine has beside the methods of Subject."""

    def engine_target(self, case: Case) -> str:
        """ "module:function" that an engine's process imports and calls with an
        loragate.engine.order.EngineOrder; it returns a loragate.engine.requests.Engine."""


class Subject(Protocol):
    name: str

    def version(self) -> str:
        """Version of the implementation, for the report."""

    def capabilities(self, machine: Machine) -> Capabilities | str:
        """What it supports on a machine, or the reason why it cannot run there at all."""

    def open(self, case: Case, machine: Machine, base: BaseLayer | None) -> AnyInstance:
        """A fresh instance with empty slots, sized for the case; an MoEInstance for an MoE site.
        lora_linear, gdn_in_proj and embedding have a `base`, and moe_layer one that is a
        BaseExperts."""
