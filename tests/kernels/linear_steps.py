"""A small linear layer with the state of a step, for tests of its forms."""

from __future__ import annotations

import torch
from torch import Tensor

from loragate.core.machine import select_interpreter

select_interpreter()

from lorakernels.batch.metadata import BatchMetadata  # noqa: E402
from lorakernels.dense.forms import LinearForm  # noqa: E402
from lorakernels.dense.ops import DenseWorkspace  # noqa: E402
from lorakernels.dense.weights import LoRAFactors  # noqa: E402
from lorakernels.layers.linear import LoRALinear  # noqa: E402
from lorakernels.layers.partition import Slice  # noqa: E402

K, WIDTH, SLOTS, MOST = 48, 24, 2, 48


class Step:
    """A layer and the state of a step."""

    def __init__(
        self, *, bias: bool = True, branches: int = 1, seed: int = 0, in_features: int = K
    ) -> None:
        self.seed, self.in_features = seed, in_features
        slices = (Slice("q", 16), Slice("k", 8))
        self.linear = LoRALinear(
            self.randn(WIDTH, in_features),
            self.randn(WIDTH) if bias else None,
            slices=slices,
            num_slots=SLOTS,
            rank=4,
        )
        for slot in range(SLOTS):
            parts = {
                part.name: LoRAFactors(
                    self.randn(4, in_features), self.randn(part.width, 4), 1.0 + slot
                )
                for part in slices
            }
            self.linear.load_adapter(slot, parts)
        self.metadata = BatchMetadata(max_tokens=MOST, max_slots=SLOTS, device="cpu")
        self.workspace = DenseWorkspace([self.linear.slots], max_tokens=MOST, branches=branches)

    def randn(self, *shape: int) -> Tensor:
        self.seed += 1
        return torch.randn(*shape, generator=torch.Generator().manual_seed(self.seed))

    def prepare(self, rows: int, *, base_only: bool = False) -> Tensor:
        slots = torch.arange(1, rows + 1, dtype=torch.int32) % (SLOTS + 1) - 1
        self.metadata.prepare(slots * 0 - 1 if base_only else slots)
        return self.randn(rows, self.in_features)

    def run(self, x: Tensor, form: LinearForm | None = None) -> Tensor:
        # what an earlier step left is no part of the result
        for buffer in self.workspace.buffers:
            buffer.fill_(float("nan"))
        return self.linear(x, self.metadata, self.workspace, form=form)
