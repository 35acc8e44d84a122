"""The delta of a linear layer, whose slots lie where the case says and get their adapters as it
says."""

from __future__ import annotations

import torch
from torch import Tensor

from loragate.core.machine import Machine
from loragate.inputs.draw import torch_dtype
from loragate.matrix.case import Buffers, Case, Loading
from loragate.protocol import Pool
from loragate.subjects.lorakernels.dead_ranks import spoil_dead_ranks
from loragate.subjects.lorakernels.factors import factors
from loragate.subjects.lorakernels.mapping import Mapping
from lorakernels.dense.ops import DenseWorkspace, dense_delta
from lorakernels.dense.stacks import AdoptedStacks, adopt_stacks
from lorakernels.dense.weights import SlotWeights


class DenseDelta(Mapping):
    def __init__(self, case: Case, machine: Machine) -> None:
        super().__init__(case, machine)
        self.loading = case.loading
        self.stacks = _stacks(case, machine) if case.buffers is Buffers.STACKS else None
        self.weights = self.stacks.weights if self.stacks else _weights(case, machine)
        self.workspace = DenseWorkspace([self.weights], max_tokens=case.max_tokens)

    def load(self, slot: int, pool: Pool) -> None:
        if self.loading is Loading.DEVICE:
            self._load_padded(slot, pool)
        elif self.stacks:
            self._write_stacks(self.stacks, slot, pool)
        else:
            parts = factors(pool, slot)
            self.weights.load(slot, [parts.get(part) for part in range(len(pool.b))])
        spoil_dead_ranks(self.weights, slot, pool)

    def unload(self, slot: int) -> None:
        self.weights.reset(slot)

    def apply(self, x: Tensor, out: Tensor) -> Tensor:
        dense_delta(x, self.weights, self.metadata, self.workspace, out)
        return out

    def _load_padded(self, slot: int, pool: Pool) -> None:
        ranks = torch.tensor(pool.ranks[slot], dtype=torch.int32, device=pool.a.device)
        scales = torch.tensor(pool.scales[slot], dtype=torch.float32, device=pool.a.device)
        b = torch.cat([part[slot] for part in pool.b])
        self.weights.load_padded(slot, pool.a[slot], b, ranks, scales)

    def _write_stacks(self, stacks: AdoptedStacks, slot: int, pool: Pool) -> None:
        """What a server does, in place: it empties the slot and writes its own tensors."""
        for stack in (*stacks.a, *stacks.b):
            stack[slot] = 0
        for part, rank in enumerate(pool.ranks[slot]):
            stacks.a[part][slot, 0, :rank] = pool.a[slot, part, :rank]
            stacks.b[part][slot, 0, :, :rank] = pool.b[part][slot, :, :rank]
        for own, new in (
            (self.weights.ranks, pool.ranks[slot]),
            (self.weights.scales, pool.scales[slot]),
        ):
            own[slot] = torch.tensor(new, dtype=own.dtype)


def _weights(case: Case, machine: Machine) -> SlotWeights:
    if case.buffers is Buffers.ARENA:
        return _in_arena(case, machine)
    return SlotWeights(
        num_slots=case.slots,
        slice_widths=case.slices,
        in_features=case.in_features,
        rank=case.rank,
        dtype=torch_dtype(case.dtype),
        device=machine.device,
    )


def _stacks(case: Case, machine: Machine) -> AdoptedStacks:
    def stack(rows: int, columns: int) -> Tensor:
        shape = (case.slots, 1, rows, columns)
        return torch.zeros(shape, dtype=torch_dtype(case.dtype), device=machine.device)

    a = [stack(case.rank, case.in_features) for _ in case.slices]
    return adopt_stacks(a, [stack(width, case.rank) for width in case.slices])


def _in_arena(case: Case, machine: Machine) -> SlotWeights:
    """Slots between other tensors: a write or a read beside them meets NaN."""
    of_a = (case.slots, len(case.slices), case.rank, case.in_features)
    of_b = (case.slots, sum(case.slices), case.rank)
    dtype = torch_dtype(case.dtype)

    def part(shape: tuple[int, ...], dtype: torch.dtype, around: float) -> Tensor:
        size = torch.Size(shape).numel()
        # odd, so that nothing is aligned by accident
        arena = torch.full((size + 14,), around, dtype=dtype, device=machine.device)
        return arena[7 : 7 + size].zero_().view(shape)

    of_slices = (case.slots, len(case.slices))
    return SlotWeights.over(
        part(of_a, dtype, float("nan")),
        part(of_b, dtype, float("nan")),
        part(of_slices, torch.int32, -1),
        part(of_slices, torch.float32, float("nan")),
        slice_widths=case.slices,
    )
