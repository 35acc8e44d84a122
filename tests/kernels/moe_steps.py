"""A small MoE layer with the state of a step, for tests of its forms and of its shared experts."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from loragate.core.machine import select_interpreter

select_interpreter()

from lorakernels.batch.metadata import BatchMetadata  # noqa: E402
from lorakernels.common.quantised import Quantised, quantise_rows  # noqa: E402
from lorakernels.layers.gate_up import GateUp  # noqa: E402
from lorakernels.layers.moe import FusedMoELoRA, MoEScratch  # noqa: E402
from lorakernels.moe.align.metadata import PairMetadata  # noqa: E402
from lorakernels.moe.layer.forms import MoEForm  # noqa: E402
from lorakernels.moe.layer.types import RouterWeight  # noqa: E402
from lorakernels.moe.weights import ExpertFactors  # noqa: E402

EXPERTS, TOP_K, HIDDEN, INTER, RANK, SLOTS, MOST = 2, 2, 24, 16, 4, 2, 24
GATED, PLAIN = ("gate_proj", "up_proj", "down_proj"), ("up_proj", "down_proj")
Shared = Callable[[Tensor], Tensor]


class Step:
    """A layer and the state of a step. Buffers hold NaN where no step has written."""

    def __init__(
        self,
        *,
        gated: bool = True,
        quantised: bool = False,
        router: RouterWeight = RouterWeight.ON_OUTPUT,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.seed, self.dtype, self.quantised = 0, dtype, quantised
        names = GATED if gated else PLAIN
        up = (len(names) - 1) * INTER
        w13, w2 = self.randn(EXPERTS, up, HIDDEN), self.randn(EXPERTS, HIDDEN, INTER)
        weights = [of_8_bits(w13), of_8_bits(w2)] if quantised else [w13, w2]
        self.layer = FusedMoELoRA(
            *weights,  # type: ignore[arg-type]
            gate_up=GateUp.HALVES if len(names) == 3 else None,
            num_slots=SLOTS,
            rank=RANK,
            dtype=dtype,
            projections=names,
            router_weight=router,
        )
        for slot in range(SLOTS):
            parts = {}
            for name in names:
                wide, deep = (HIDDEN, INTER) if name == "down_proj" else (INTER, HIDDEN)
                a, b = self.randn(EXPERTS, RANK, deep), self.randn(EXPERTS, wide, RANK)
                parts[f"experts.{name}"] = ExpertFactors(a, b, 1.0 + slot)
            self.layer.load_adapter(slot, parts)
        sizes = {"max_tokens": MOST, "top_k": TOP_K}
        self.scratch = MoEScratch([self.layer], **sizes)
        self.pairs = PairMetadata(
            **sizes, num_experts=EXPERTS, max_slots=SLOTS, device="cpu", with_base=True
        )
        self.batch = BatchMetadata(max_tokens=MOST, max_slots=SLOTS, device="cpu")

    def randn(self, *shape: int) -> Tensor:
        self.seed += 1
        drawn = torch.randn(*shape, generator=torch.Generator().manual_seed(self.seed))
        return drawn.to(self.dtype)

    def prepare(self, rows: int, *, base_only: bool = False) -> Tensor:
        slots = torch.arange(1, rows + 1, dtype=torch.int32) % (SLOTS + 1) - 1
        self.batch.prepare(slots * 0 - 1 if base_only else slots)
        return self.randn(rows, HIDDEN)

    def run(self, x: Tensor, form: MoEForm | None = None, shared: Shared | None = None) -> Tensor:
        buffers = self.scratch.buffers
        for buffer in (buffers.act, buffers.y, self.scratch.workspace.shrunk):
            buffer.fill_(float("nan"))
        rows = x.numel() // HIDDEN
        ids = torch.arange(rows * TOP_K, dtype=torch.int32).view(rows, TOP_K) % EXPERTS
        weights = torch.linspace(0.5, 2.0, rows * TOP_K).view(rows, TOP_K)
        given = quantise_rows(x) if self.quantised else None
        found: Tensor = self.layer(
            x,
            ids,
            weights,
            self.batch,
            self.pairs,
            self.scratch,
            quantised_x=given,
            shared=shared,
            form=form,
        )
        return found


def of_8_bits(weight: Tensor) -> Quantised:
    found = quantise_rows(weight.view(-1, weight.shape[-1]))
    return Quantised(found.values.view(weight.shape), found.scales.view(weight.shape[:-1]))


def doubled(x: Tensor) -> Tensor:
    return x * 2


def runs(log: list[str]) -> list[str]:
    """What ran, each with its stream."""
    return [line.replace(" runs", "") for line in log if "runs" in line]


def forks(log: list[str]) -> int:
    """How often a side waited for the main stream."""
    return sum("main records" in line for line in log)
