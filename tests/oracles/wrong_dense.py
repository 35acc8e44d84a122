"""Subjects of dense_delta with one defect each: the torch subject with one change."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from loragate.inputs.placement import whole
from loragate.matrix.case import Case
from loragate.protocol import Pool
from loragate.subjects.torch.subject import DenseDelta


class NeighboursA(DenseDelta):
    def load(self, slot: int, pool: Pool) -> None:
        super().load(slot, pool)
        neighbour = pool.a[(slot + 1) % pool.num_slots]
        self.slots[slot] = [
            (neighbour[part, : len(a)].clone(), b, scale)
            for part, (a, b, scale) in enumerate(self.slots[slot])
        ]


class LastColumnIgnored(DenseDelta):
    def apply(self, x: Tensor, out: Tensor) -> Tensor:
        shorter = x.clone()
        shorter[:, -1] = 0
        return super().apply(shorter, out)


class LastRankDropped(DenseDelta):
    def load(self, slot: int, pool: Pool) -> None:
        super().load(slot, pool)
        self.slots[slot] = [(a[:-1], b[:, :-1], scale) for a, b, scale in self.slots[slot]]


class ScaleOnePercentOff(DenseDelta):
    def load(self, slot: int, pool: Pool) -> None:
        super().load(slot, pool)
        self.slots[slot] = [(a, b, scale * 1.01) for a, b, scale in self.slots[slot]]


class FirstSlicesScale(DenseDelta):
    def load(self, slot: int, pool: Pool) -> None:
        super().load(slot, pool)
        scale = pool.scales[slot][0]
        self.slots[slot] = [(a, b, scale) for a, b, _ in self.slots[slot]]


class OverwritesOutput(DenseDelta):
    def apply(self, x: Tensor, out: Tensor) -> Tensor:
        used = (self.token_slots >= 0).nonzero().flatten()
        out[used] = 0
        return super().apply(x, out)


class DeltaForBaseRows(DenseDelta):
    def prepare(self, token_slots: Tensor) -> None:
        self.token_slots = token_slots.clamp(min=0)


class ZeroAddedToBaseRows(DenseDelta):
    def apply(self, x: Tensor, out: Tensor) -> Tensor:
        super().apply(x, out)
        return out.add_(0.0)


class ZeroAddedBehindTheFirstColumn(DenseDelta):
    def apply(self, x: Tensor, out: Tensor) -> Tensor:
        super().apply(x, out)[:, 1:] += 0.0
        return out


class ZeroAddedToTheLastColumnOfSliceZero(DenseDelta):
    def apply(self, x: Tensor, out: Tensor) -> Tensor:
        super().apply(x, out)[:, 23] += 0.0
        return out


class OverwritesZerosOfBaseRows(DenseDelta):
    def apply(self, x: Tensor, out: Tensor) -> Tensor:
        base = out[self.token_slots < 0]
        out[self.token_slots < 0] = torch.where(base == 0, 1.0, base)
        return super().apply(x, out)


class WipesNanOfTheBase(DenseDelta):
    def apply(self, x: Tensor, out: Tensor) -> Tensor:
        return torch.nan_to_num(super().apply(x, out), posinf=torch.inf, neginf=-torch.inf, out=out)


class WipesInfOfTheBase(DenseDelta):
    def apply(self, x: Tensor, out: Tensor) -> Tensor:
        largest = torch.finfo(out.dtype).max
        return super().apply(x, out).clamp_(-largest, largest)


class SharesItsScales(DenseDelta):
    """All instances of a shape have the scales that were loaded last."""

    scales: ClassVar[dict[int, list[float]]] = {}

    def load(self, slot: int, pool: Pool) -> None:
        super().load(slot, pool)
        self.scales[slot] = list(pool.scales[slot])

    def apply(self, x: Tensor, out: Tensor) -> Tensor:
        own = self.slots
        self.slots = {
            slot: [(a, b, s) for (a, b, _), s in zip(parts, self.scales[slot], strict=True)]
            for slot, parts in own.items()
        }
        super().apply(x, out)
        self.slots = own
        return out


class WritesPastTheLastColumn(DenseDelta):
    def apply(self, x: Tensor, out: Tensor) -> Tensor:
        super().apply(x, out)
        rows, columns = out.shape
        whole(out)[out.storage_offset() + (rows - 1) * out.stride(0) + columns] += 1
        return out


class ReadsDeadRanks(DenseDelta):
    def load(self, slot: int, pool: Pool) -> None:
        self.slots[slot] = [
            (pool.a[slot, part].clone(), b[slot].clone(), pool.scales[slot][part])
            for part, b in enumerate(pool.b)
        ]


class ChangesItsInput(DenseDelta):
    def apply(self, x: Tensor, out: Tensor) -> Tensor:
        super().apply(x, out)
        # never zero before
        x[-1, -1] = 0
        return out


class ReadsBaseRows(DenseDelta):
    def apply(self, x: Tensor, out: Tensor) -> Tensor:
        super().apply(x, out)
        out += 0 * x[:, :1]
        return out


class ReadsUnusedSlots(DenseDelta):
    def apply(self, x: Tensor, out: Tensor) -> Tensor:
        super().apply(x, out)
        used = (self.token_slots >= 0).nonzero().flatten()
        for factors in self.slots.values():
            for a, b, _ in factors:
                out[used] += 0 * (b.sum() * a.sum())
        return out


class ReadsFreshMemory(DenseDelta):
    def apply(self, x: Tensor, out: Tensor) -> Tensor:
        super().apply(x, out)
        used = (self.token_slots >= 0).nonzero().flatten()
        scratch = torch.empty(len(used), 1, dtype=torch.int32)
        # correct where memory happens to hold anything else
        out[used] += (scratch == 0x7F7F7F7F).to(out.dtype)
        return out


class CountsItsRuns(DenseDelta):
    runs = 0

    def apply(self, x: Tensor, out: Tensor) -> Tensor:
        super().apply(x, out)
        if self.runs:
            first = out[:1, :1]
            first.copy_(torch.nextafter(first, first + 1))
        self.runs += 1
        return out


class CountsItsInstances(DenseDelta):
    instances = 0

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        type(self).instances += 1
        self.number = self.instances

    def apply(self, x: Tensor, out: Tensor) -> Tensor:
        super().apply(x, out)
        out[0, 0] = out[0, 0] + self.number
        return out


class DependsOnTheRowsPlace(DenseDelta):
    def apply(self, x: Tensor, out: Tensor) -> Tensor:
        super().apply(x, out)
        out += 0.5 * torch.arange(len(out))[:, None]
        return out


class DependsOnTheSlotsNumber(DenseDelta):
    def load(self, slot: int, pool: Pool) -> None:
        super().load(slot, pool)
        self.slots[slot] = [(a, b, scale * (slot + 1)) for a, b, scale in self.slots[slot]]


class RewritesOnlyRowsWithAdapter(DenseDelta):
    """A row that is a base row now keeps its previous slot in the mapping."""

    def prepare(self, token_slots: Tensor) -> None:
        before = torch.full_like(token_slots, -1)
        kept = min(len(before), len(self.token_slots))
        before[:kept] = self.token_slots[:kept]
        self.token_slots = torch.where(token_slots >= 0, token_slots, before)


class SkipsPrepareWithoutAdapters(DenseDelta):
    def prepare(self, token_slots: Tensor) -> None:
        if (token_slots >= 0).any() or not len(self.token_slots):
            super().prepare(token_slots)
        else:
            self.token_slots = self.token_slots[: len(token_slots)]


class LoadsWithoutReset(DenseDelta):
    """Buffers of full rank: a smaller adapter leaves the upper ranks of its predecessor."""

    def load(self, slot: int, pool: Pool) -> None:
        if slot not in self.slots:
            ReadsDeadRanks.load(self, slot, pool)
        parts = zip(self.slots[slot], pool.b, pool.ranks[slot], pool.scales[slot], strict=True)
        kept = []
        for part, ((a, b, _), own, rank, scale) in enumerate(parts):
            a[:rank] = pool.a[slot, part, :rank]
            b[:, :rank] = own[slot, :, :rank]
            kept.append((a, b, scale))
        self.slots[slot] = kept


class WritesAsManyRowsAsBefore(DenseDelta):
    """Behind the rows of a smaller batch it writes where those of a larger one were."""

    most = 0

    def apply(self, x: Tensor, out: Tensor) -> Tensor:
        super().apply(x, out)
        self.most = max(self.most, len(x))
        if self.most > len(x):
            out.as_strided((len(x) + 1, out.shape[1]), out.stride())[len(x)] = 0
        return out


class KeepsAnAbsentSlice(DenseDelta):
    def load(self, slot: int, pool: Pool) -> None:
        before = self.slots.get(slot)
        super().load(slot, pool)
        if before is not None:
            self.slots[slot] = [
                new if len(new[0]) else old
                for old, new in zip(before, self.slots[slot], strict=True)
            ]


class UnloadDoesNothing(DenseDelta):
    def unload(self, slot: int) -> None:
        pass


class LoadsASlotOnce(DenseDelta):
    def load(self, slot: int, pool: Pool) -> None:
        if slot not in self.slots:
            super().load(slot, pool)


class ScaleWithoutItsSign(DenseDelta):
    def load(self, slot: int, pool: Pool) -> None:
        super().load(slot, pool)
        self.slots[slot] = [(a, b, abs(scale)) for a, b, scale in self.slots[slot]]


class TakesAScaleOfZeroForNone(DenseDelta):
    def load(self, slot: int, pool: Pool) -> None:
        super().load(slot, pool)
        self.slots[slot] = [(a, b, scale or 1.0) for a, b, scale in self.slots[slot]]


class UnloadsTheNextSlotToo(DenseDelta):
    def unload(self, slot: int) -> None:
        super().unload(slot)
        self.slots.pop(slot + 1, None)


class UnloadsTheSlotBeforeToo(DenseDelta):
    def unload(self, slot: int) -> None:
        super().unload(slot)
        self.slots.pop(slot - 1, None)


class KnowsAMappingByItsCounts(DenseDelta):
    counts: tuple[int, ...] = ()

    def prepare(self, token_slots: Tensor) -> None:
        counts = tuple(torch.bincount(token_slots + 1, minlength=4).tolist())
        if counts != self.counts:
            super().prepare(token_slots)
        self.counts = counts


class KnowsAMappingByItsSum(DenseDelta):
    known: tuple[int, int] | None = None

    def prepare(self, token_slots: Tensor) -> None:
        known = (len(token_slots), int(token_slots.sum()))
        if known != self.known:
            super().prepare(token_slots)
        self.known = known


class KnowsAMappingByItsEnds(DenseDelta):
    known: tuple[int, ...] = ()

    def prepare(self, token_slots: Tensor) -> None:
        known = (len(token_slots), *token_slots[:4].tolist(), *token_slots[-4:].tolist())
        if known != self.known:
            super().prepare(token_slots)
        self.known = known


class SharesItsMappingWithAllInstances(DenseDelta):
    last = torch.empty(0, dtype=torch.int32)

    def prepare(self, token_slots: Tensor) -> None:
        SharesItsMappingWithAllInstances.last = token_slots.clone()

    def apply(self, x: Tensor, out: Tensor) -> Tensor:
        # of a larger batch of another instance these are the first rows
        super().prepare(self.last[: len(x)])
        return super().apply(x, out)


class KeepsTheMappingItGets(DenseDelta):
    def prepare(self, token_slots: Tensor) -> None:
        self.token_slots = token_slots


class KeepsTheFactorsItGets(DenseDelta):
    def load(self, slot: int, pool: Pool) -> None:
        self.slots[slot] = [
            (pool.a[slot, part, :rank], pool.b[part][slot, :, :rank], pool.scales[slot][part])
            for part, rank in enumerate(pool.ranks[slot])
        ]


class PreparesOnTop(DenseDelta):
    """A step that was prepared and did not run leaves its adapters."""

    applied = True

    def prepare(self, token_slots: Tensor) -> None:
        before = self.token_slots
        super().prepare(token_slots)
        if not self.applied and len(before) == len(token_slots):
            self.token_slots = torch.where(before >= 0, before, self.token_slots)
        self.applied = False

    def apply(self, x: Tensor, out: Tensor) -> Tensor:
        self.applied = True
        return super().apply(x, out)
