"""The layers of lorakernels as `bench streams` times them: in a given form, or in the one that
their plan takes with the switch on."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from loragate.bench.streams_rows import GDNShape
from loragate.matrix.case import Case
from loragate.protocol import BaseLayer, Pool
from loragate.subjects.lorakernels.factors import factors
from lorakernels.batch.metadata import BatchMetadata
from lorakernels.dense.forms import LinearForm, plan_form
from lorakernels.dense.ops import DenseWorkspace, shape_of_batch
from lorakernels.dense.shape import DenseShape
from lorakernels.dense.sizes import may_store
from lorakernels.dense.weights import SlotWeights
from lorakernels.gdn.forms import GDNForm, plan_gdn
from lorakernels.layers.gdn import DeltaNetHeads, GatedDeltaNetInputProjection
from lorakernels.layers.linear import LoRALinear
from lorakernels.layers.partition import Slice
from lorakernels.runtime.options import DUAL_STREAM, dual_stream


@contextmanager
def switched_on() -> Iterator[None]:
    """Plans may use a second stream; afterwards what held before."""
    before = os.environ.get(DUAL_STREAM)
    os.environ[DUAL_STREAM] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[DUAL_STREAM]
        else:
            os.environ[DUAL_STREAM] = before


class FormedLayer(ABC):
    """A layer with adapters in its slots, for steps of at most `max_tokens` rows."""

    def __init__(self, slots: SlotWeights, max_tokens: int) -> None:
        device = slots.a.device
        self._slots = slots
        self._metadata = BatchMetadata(
            max_tokens=max_tokens, max_slots=slots.num_slots, device=device
        )
        self._workspace = DenseWorkspace([slots], max_tokens=max_tokens)

    def prepare(self, token_slots: Tensor) -> None:
        """Once a step; token_slots int32 [tokens] on the CPU."""
        self._metadata.prepare(token_slots)

    def run(self, x: Tensor, form: str) -> tuple[Tensor, ...]:
        """The outputs, side by side the columns of the layer, in a form as streams_rows.py names
        it."""
        return self._forward(x, form)

    def run_planned(self, x: Tensor) -> tuple[Tensor, ...]:
        with switched_on():
            return self._forward(x, None)

    def planned(self, tokens: int) -> str:
        """The form that `run_planned` takes for a step."""
        with switched_on():
            is_on = dual_stream(self._slots.a.device)
        return self._plan(shape_of_batch(tokens, self._slots), dual=is_on)

    @abstractmethod
    def _forward(self, x: Tensor, form: str | None) -> tuple[Tensor, ...]: ...

    @abstractmethod
    def _plan(self, shape: DenseShape, *, dual: bool) -> str: ...


class LinearLayer(FormedLayer):
    """A linear layer; `pool` has adapters for every slot."""

    def __init__(self, case: Case, base: BaseLayer, pool: Pool) -> None:
        slices = [Slice(f"slice{part}", width) for part, width in enumerate(case.slices)]
        self._layer = LoRALinear(
            base.weight, base.bias, slices=slices, num_slots=case.slots, rank=case.rank
        )
        for slot in range(pool.num_slots):
            self._layer.load_adapter(slot, factors(pool, slot))
        super().__init__(self._layer.slots, case.tokens)

    def forms(self, tokens: int) -> tuple[str, ...]:
        """Those that a step can take."""
        fits = may_store(shape_of_batch(tokens, self._slots))
        return tuple(
            form.name.lower() for form in LinearForm if fits or form is not LinearForm.STORED
        )

    def _forward(self, x: Tensor, form: str | None) -> tuple[Tensor, ...]:
        wanted = None if form is None else LinearForm[form.upper()]
        return (self._layer(x, self._metadata, self._workspace, form=wanted),)

    def _plan(self, shape: DenseShape, *, dual: bool) -> str:
        return plan_form(shape, dual_stream=dual).name.lower()


class InputProjection(FormedLayer):
    """The input projection of a gated delta net. `base` and `pool` have a slice for each module,
    those of qkvz first; a slice of rank 0 has no adapter."""

    def __init__(self, shape: GDNShape, case: Case, base: BaseLayer, pool: Pool) -> None:
        heads = DeltaNetHeads(
            key_heads=shape.key_heads,
            value_heads=shape.value_heads,
            key_size=shape.head_size,
            value_size=shape.head_size,
        )
        modules = heads.grouped() if shape.grouped else heads.separate()
        qkvz_features = sum(shape.qkvz)
        qkvz, ba = base.weight[:qkvz_features], base.weight[qkvz_features:]
        self._layer = GatedDeltaNetInputProjection(
            qkvz, ba, modules=modules, num_slots=case.slots, rank=case.rank
        )
        names = [module.name for module in modules.all]
        for slot in range(pool.num_slots):
            parts = {names[part]: own for part, own in factors(pool, slot).items()}
            self._layer.load_adapter(slot, parts)
        super().__init__(self._layer.slots, case.tokens)

    def _forward(self, x: Tensor, form: str | None) -> tuple[Tensor, ...]:
        wanted = None if form is None else GDNForm[form.upper()]
        outputs: tuple[Tensor, Tensor] = self._layer(
            x, self._metadata, self._workspace, form=wanted
        )
        return outputs

    def _plan(self, shape: DenseShape, *, dual: bool) -> str:
        return plan_gdn(shape, dual_stream=dual).name.lower()
