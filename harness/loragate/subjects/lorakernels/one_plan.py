"""The project's kernels as a server has them that asks for batch invariance: within their calls the
option of the process is on, which other cases of this process do not want."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from unittest.mock import patch

from torch import Tensor

from loragate.core.machine import Machine
from loragate.matrix.case import Case
from loragate.protocol import BaseExperts, Routes
from loragate.subjects.lorakernels.dense_delta import DenseDelta
from loragate.subjects.lorakernels.moe_delta import MoEDelta
from loragate.subjects.lorakernels.moe_layer import MoELayer
from lorakernels.runtime.options import BATCH_INVARIANT


class OnePlanDense(DenseDelta):
    def __init__(self, case: Case, machine: Machine) -> None:
        with _option():
            super().__init__(case, machine)

    def prepare(self, token_slots: Tensor) -> None:
        with _option():
            super().prepare(token_slots)

    def apply(self, x: Tensor, out: Tensor) -> Tensor:
        with _option():
            return super().apply(x, out)


class OnePlanMoE(MoEDelta):
    def __init__(self, case: Case, machine: Machine) -> None:
        with _option():
            super().__init__(case, machine)

    def prepare(self, token_slots: Tensor) -> None:
        with _option():
            super().prepare(token_slots)

    def apply(self, x: Tensor, out: Tensor, routes: Routes) -> Tensor:
        with _option():
            return super().apply(x, out, routes)


class OnePlanLayer(MoELayer):
    def __init__(self, case: Case, machine: Machine, base: BaseExperts) -> None:
        with _option():
            super().__init__(case, machine, base)

    def prepare(self, token_slots: Tensor) -> None:
        with _option():
            super().prepare(token_slots)

    def apply(self, x: Tensor, out: Tensor, routes: Routes) -> Tensor:
        with _option():
            return super().apply(x, out, routes)


def _option() -> AbstractContextManager[object]:
    return patch.dict(os.environ, {BATCH_INVARIANT: "1"})
