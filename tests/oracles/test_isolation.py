"""The isolation oracle fails subjects in which an adapter reaches rows of others, and no other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from loragate.core.verdict import Failure, Judgement, OracleName, Verdict
from loragate.matrix.case import Case, Dtype, Mix, Ranks, RouterWeights, Site
from loragate.oracles import ORACLES
from loragate.protocol import Pool, Trial
from loragate.subjects.torch.subject import DenseDelta

SEEDS = range(5)


class Stacked(DenseDelta):
    """A slot is an entry of a stack, as in a server: it has memory also while it is empty."""

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.a = torch.zeros(case.slots, len(case.slices), case.rank, case.in_features)
        self.b = torch.zeros(case.slots, sum(case.slices), case.rank)
        self.widths = case.slices

    def load(self, slot: int, pool: Pool) -> None:
        self.unload(slot)
        for part, b in enumerate(pool.b):
            rank, start = pool.ranks[slot][part], sum(self.widths[:part])
            rows = slice(start, start + self.widths[part])
            self.a[slot, part, :rank] = pool.a[slot, part, :rank].float()
            self.b[slot, rows, :rank] = b[slot, :, :rank].float() * pool.scales[slot][part]

    def unload(self, slot: int) -> None:
        self.a[slot] = 0
        self.b[slot] = 0

    def apply(self, x: Tensor, out: Tensor) -> Tensor:
        for row, slot in enumerate(self.token_slots.tolist()):
            if slot >= 0:
                out[row] = (out[row].float() + self.delta(x[row].float(), slot)).to(out.dtype)
        return out

    def delta(self, x: Tensor, slot: int) -> Tensor:
        shrunk = (self.a[slot] @ x).repeat_interleave(torch.tensor(self.widths), 0)
        return (self.b[slot] * shrunk).sum(1)


class UnwantedTimesZero(Stacked):
    """All slots are computed, and those of others are multiplied by zero."""

    def delta(self, x: Tensor, slot: int) -> Tensor:
        slots = range(len(self.a))
        parts = [float(other == slot) * super(type(self), self).delta(x, other) for other in slots]
        return torch.stack(parts).sum(0)


class ActiveTimesZero(DenseDelta):
    """Rows of one slot are selected by a multiplication; empty slots are skipped."""

    def apply(self, x: Tensor, out: Tensor) -> Tensor:
        for slot, factors in self.slots.items():
            mine = (self.token_slots == slot).float()[:, None]
            deltas = [scale * x.float() @ a.float().T @ b.float().T for a, b, scale in factors]
            out += (mine * torch.cat(deltas, 1)).to(out.dtype)
        return out


class DropsInf(ActiveTimesZero):
    """Only NaN of an adapter reaches other rows."""

    def load(self, slot: int, pool: Pool) -> None:
        super().load(slot, pool)
        self.slots[slot] = [
            (torch.where(a.isinf(), 0, a), torch.where(b.isinf(), 0, b), scale)
            for a, b, scale in self.slots[slot]
        ]


class DropsNan(ActiveTimesZero):
    """Only Inf of an adapter reaches other rows."""

    def load(self, slot: int, pool: Pool) -> None:
        super().load(slot, pool)
        self.slots[slot] = [
            (torch.where(a.isnan(), 0, a), torch.where(b.isnan(), 0, b), scale)
            for a, b, scale in self.slots[slot]
        ]


class ReachesOtherAdapters(ActiveTimesZero):
    """Base rows are left alone, and so are adapters without rows."""

    def apply(self, x: Tensor, out: Tensor) -> Tensor:
        loaded, used = self.slots, (self.token_slots >= 0).nonzero().flatten()
        self.slots = {slot: loaded[slot] for slot in loaded if slot in self.token_slots.tolist()}
        out[used] = super().apply(x, out.clone())[used]
        self.slots = loaded
        return out


class Noting(Stacked):
    """Knows which slots have been loaded."""

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.loaded = set[int]()

    def load(self, slot: int, pool: Pool) -> None:
        super().load(slot, pool)
        self.loaded.add(slot)


class NeverLoadedTimesZero(Noting):
    """A slot that never had an adapter is computed as well, and multiplied by zero."""

    def delta(self, x: Tensor, slot: int) -> Tensor:
        others = set(range(len(self.a))) - self.loaded
        unwanted = [0 * super(NeverLoadedTimesZero, self).delta(x, other) for other in others]
        return torch.stack([super().delta(x, slot), *unwanted]).sum(0)


class FromOneSlot(Noting):
    """One slot is computed for every row and multiplied by zero, with an adapter or without."""

    # the slot that is read: while it has an adapter, or when that has left it
    reached: int
    resident: bool

    def unload(self, slot: int) -> None:
        if self.resident or slot != self.reached:
            super().unload(slot)
        self.loaded.discard(slot)

    def delta(self, x: Tensor, slot: int) -> Tensor:
        is_read = (self.reached in self.loaded) is self.resident
        unwanted = super().delta(x, self.reached) * 0 if is_read else 0
        return super().delta(x, slot) + unwanted


class LeavesTheOldOne(Stacked):
    """The dead ranks of a slot are read, and keep what was there."""

    def unload(self, slot: int) -> None:
        pass


class ResetsAllButDeadRanks(Stacked):
    """What an adapter leaves behind the ranks of the next one is multiplied by zeros of B."""

    def load(self, slot: int, pool: Pool) -> None:
        kept = self.a[slot].clone()
        super().load(slot, pool)
        for part, rank in enumerate(pool.ranks[slot]):
            self.a[slot, part, rank:] = kept[part, rank:]


class Refusing(ActiveTimesZero):
    def load(self, slot: int, pool: Pool) -> None:
        if not pool.a.isfinite().all():
            raise ValueError("a must be finite")
        super().load(slot, pool)


class RowsByOneHotProducts(DenseDelta):
    """The rows of a slot are gathered by a product with a matrix of zeros and ones."""

    def apply(self, x: Tensor, out: Tensor) -> Tensor:
        for slot in self.slots:
            rows = (self.token_slots == slot).nonzero().flatten()
            one_hot = torch.nn.functional.one_hot(rows, len(x)).float()
            gathered = torch.zeros_like(x)
            gathered[rows] = (one_hot @ x.float()).to(x.dtype)
            whole, self.token_slots = self.token_slots, torch.full_like(self.token_slots, -1)
            self.token_slots[rows] = slot
            super().apply(gathered, out)
            self.token_slots = whole
        return out


def memory(instance: Stacked, slot: int) -> list[Tensor]:
    return [instance.a[slot], instance.b[slot]]


def judge(
    make_trial: Callable[..., Trial], instance: type[DenseDelta], seed: int, **promises: Any
) -> Judgement:
    trial = make_trial(instance, seed, promises, tokens=12, in_features=32)
    assert ORACLES[OracleName.ISOLATION].applies(trial) is None
    return ORACLES[OracleName.ISOLATION].judge(trial)


@pytest.mark.parametrize(
    ("instance", "promises"),
    [
        (UnwantedTimesZero, {"slot_memory": memory}),
        (UnwantedTimesZero, {}),
        (ActiveTimesZero, {}),
        (DropsInf, {}),
        (DropsNan, {}),
        (ReachesOtherAdapters, {}),
        (NeverLoadedTimesZero, {"slot_memory": memory}),
        (LeavesTheOldOne, {"slot_memory": memory}),
        (RowsByOneHotProducts, {}),
    ],
)
def test_an_adapter_that_reaches_the_rows_of_others_fails(
    instance: type[DenseDelta], promises: dict[str, Any], make_trial: Callable[..., Trial]
) -> None:
    for seed in SEEDS:
        judgement = judge(make_trial, instance, seed, **promises)
        assert judgement.failure is Failure.NOT_ISOLATED, judgement


@pytest.mark.parametrize("promises", [{}, {"slot_memory": memory}])
def test_an_adapter_that_is_read_with_what_a_larger_one_left_behind_its_ranks_fails(
    promises: dict[str, Any], make_trial: Callable[..., Trial]
) -> None:
    for seed in SEEDS:
        # of so many slots one of the two that are spoiled has dead ranks
        trial = make_trial(ResetsAllButDeadRanks, seed, promises, tokens=40, slots=6, rank=8)
        judgement = ORACLES[OracleName.ISOLATION].judge(trial)
        assert judgement.failure is Failure.NOT_ISOLATED, judgement


@pytest.mark.parametrize("resident", [True, False])
@pytest.mark.parametrize("reached", range(4))
def test_an_adapter_without_rows_that_reaches_others_fails_whichever_it_is(
    reached: int, resident: bool, make_trial: Callable[..., Trial]
) -> None:
    kind = type("Leaky", (FromOneSlot,), {"reached": reached, "resident": resident})
    for seed in SEEDS:
        trial = make_trial(kind, seed, {}, tokens=9, slots=5, mix=Mix.LAST_SLOT)
        judgement = ORACLES[OracleName.ISOLATION].judge(trial)
        assert judgement.failure is Failure.NOT_ISOLATED, judgement


def test_the_rows_of_the_last_adapter_that_was_spoiled_are_looked_at_again(
    make_trial: Callable[..., Trial],
) -> None:
    # in a batch of one slot no other row tells
    trial = make_trial(ResetsAllButDeadRanks, 0, {}, tokens=9, slots=1, rank=8, ranks=Ranks.MIXED)
    judgement = ORACLES[OracleName.ISOLATION].judge(trial)
    assert "good adapters are in place of those that were all Inf or NaN" in judgement.message


@pytest.mark.parametrize(
    ("instance", "promises"),
    [(DenseDelta, {}), (Stacked, {}), (Stacked, {"slot_memory": memory}), (Refusing, {})],
)
def test_adapters_that_keep_to_their_rows_pass(
    instance: type[DenseDelta], promises: dict[str, Any], make_trial: Callable[..., Trial]
) -> None:
    for seed in range(20):
        judgement = judge(make_trial, instance, seed, **promises)
        assert judgement.verdict is Verdict.PASS, judgement


def test_the_message_names_the_adapter_and_the_place_is_that_of_a_row_of_another(
    make_trial: Callable[..., Trial],
) -> None:
    judgement = judge(make_trial, ActiveTimesZero, 1)
    assert "the adapter of slot " in judgement.message
    assert f"slot {judgement.where['slot']} " not in judgement.message


@pytest.mark.parametrize("site", [Site.LORA_LINEAR, Site.MOE_DELTA, Site.MOE_LAYER])
def test_the_torch_subject_keeps_adapters_apart_at_every_site(
    site: Site, make_trial: Callable[..., Trial]
) -> None:
    axes: dict[str, Any] = {"site": site, "tokens": 7, "slots": 4, "dtype": Dtype.BF16}
    axes |= {"experts": 2, "in_features": 24, "slices": (16, 16), "router": RouterWeights.OUTPUT}
    for seed in SEEDS:
        trial = make_trial(None, seed, **axes)
        assert ORACLES[OracleName.ISOLATION].judge(trial).verdict is Verdict.PASS
