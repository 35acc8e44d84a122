"""Linear layers whose adapters are sharded by rank over a group that runs in this process, and the
same layers whole."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from loragate.core.machine import select_interpreter

select_interpreter()

from lorakernels.batch.metadata import BatchMetadata  # noqa: E402
from lorakernels.dense.ops import DenseWorkspace  # noqa: E402
from lorakernels.dense.weights import LoRAFactors  # noqa: E402
from lorakernels.layers.linear import LoRALinear  # noqa: E402
from lorakernels.layers.partition import LoRASharding, Parallel, Slice  # noqa: E402
from lorakernels.layers.wrapped import WrappedLoRALinear  # noqa: E402
from lorakernels.runtime.collectives import SimulatedRanks  # noqa: E402

SLOTS, RANK, MOST = 4, 10, 16
# slot 3 is empty
ROWS = torch.tensor([2, -1, 0, 0, 1, 3, -1, 2, 0, 2], dtype=torch.int32)
# two heads of keys and values: fewer than four ranks
QKV = (Slice("q", 48, heads=4), Slice("k", 16, heads=2), Slice("v", 8, heads=2))
WIDE = (Slice("gate", 24), Slice("up", 36))
OUT = (Slice("o", 37),)

Adapter = dict[str, LoRAFactors]


def randn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def factors(rank: int, width: int, seed: int, inputs: int) -> LoRAFactors:
    a, b = randn(rank, inputs, seed=seed), randn(width, rank, seed=seed + 1)
    return LoRAFactors(a, b, 0.5 + seed % 3)


def adapters(slices: Sequence[Slice], inputs: int) -> list[Adapter]:
    """Ranks differ by slot and slice: all of the buffers, one, and less than a rank of four holds;
    where there are several slices, slot 1 lacks the first one."""
    ranks = ((10, 3, 5), (1, 10, 2), (2, 7, 10))
    pool = [
        {s.name: factors(r, s.width, 100 * slot + 10 * i, inputs) for i, (s, r) in pairs}
        for slot, row in enumerate(ranks)
        for pairs in [list(enumerate(zip(slices, row, strict=False)))]
    ]
    if len(slices) > 1:
        del pool[1][slices[0].name]
    return pool


@dataclass(frozen=True)
class Group:
    """A layer over several ranks, and the same layer whole."""

    slices: Sequence[Slice]
    inputs: int
    ranks: Sequence[LoRALinear | WrappedLoRALinear]
    whole: LoRALinear
    simulated: SimulatedRanks
    parallel: Parallel

    @classmethod
    def of(
        cls,
        slices: Sequence[Slice],
        parallel: Parallel,
        tp: int,
        *,
        inputs: int = 48,
        dtype: torch.dtype = torch.float32,
        build: Callable[..., LoRALinear | WrappedLoRALinear] = LoRALinear,
    ) -> Group:
        width = sum(s.width for s in slices)
        base = randn(width, inputs, seed=1).to(dtype), randn(width, seed=2).to(dtype)
        shape: dict[str, Any] = {"slices": slices, "num_slots": SLOTS, "rank": RANK}
        simulated = SimulatedRanks(tp)
        ranks = [
            build(
                *base,
                **shape,
                parallel=parallel,
                tp_size=tp,
                tp_rank=rank,
                sharding=LoRASharding.RANK,
                collective=simulated.rank(rank),
            )
            for rank in range(tp)
        ]
        group = cls(slices, inputs, ranks, LoRALinear(*base, **shape), simulated, parallel)
        for slot, adapter in enumerate(adapters(slices, inputs)):
            group.load(slot, adapter)
        return group

    def load(self, slot: int, adapter: Adapter) -> None:
        for layer in (*self.ranks, self.whole):
            layer.load_adapter(slot, adapter)

    def workspace(self) -> DenseWorkspace:
        """As it may be when a layer gets it."""
        made = DenseWorkspace([layer.slots for layer in self.ranks], max_tokens=MOST)
        made.shrunk.fill_(math.nan)
        return made

    def parts(self, x: Tensor, rows: Tensor = ROWS) -> list[Tensor]:
        """What each rank returns."""
        prepared = mapping(rows)
        inputs = [layer.cut.inputs for layer in self.ranks]
        local = [F.pad(x[:, i.start : i.stop], (0, i.size - i.live)) for i in inputs]
        # as in processes of their own, no rank finds what another one has left
        operands = zip(self.ranks, local, [self.workspace() for _ in self.ranks], strict=True)
        return self.simulated.run(
            [lambda layer=layer, x=x, w=w: layer(x, prepared, w) for layer, x, w in operands]
        )

    def check(self, x: Tensor, rows: Tensor = ROWS) -> None:
        """The ranks together return what the whole layer does, and each what it holds of it."""
        workspace = DenseWorkspace([self.whole.slots], max_tokens=MOST)
        want = self.whole(x, mapping(rows), workspace)
        parts = self.parts(x, rows)
        if self.parallel is Parallel.ROW:
            assert_near(torch.stack(parts).sum(0), want)
            return
        of_slices = want.split([s.width for s in self.slices], dim=1)
        for layer, part in zip(self.ranks, parts, strict=True):
            columns = [
                out[:, shard.start : shard.stop]
                for out, shard in zip(of_slices, layer.cut.columns, strict=True)
            ]
            assert_near(part, torch.cat(columns, dim=1))


def mapping(rows: Tensor) -> BatchMetadata:
    metadata = BatchMetadata(max_tokens=MOST, max_slots=SLOTS, device="cpu")
    metadata.prepare(rows)
    return metadata


def assert_near(got: Tensor, want: Tensor) -> None:
    limits = {torch.float32: 1e-4, torch.bfloat16: 0.3}
    torch.testing.assert_close(got, want, rtol=1e-2 * limits[got.dtype], atol=limits[got.dtype])
