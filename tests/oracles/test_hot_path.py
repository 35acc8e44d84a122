"""The hot_path oracle, with subjects that do one thing too much in a step.

`Steady` is right: its buffers are allocated once, and a mapping reaches its table without a wait.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from loragate.core.machine import interpreter_is_on
from loragate.core.verdict import Failure, OracleName, Verdict
from loragate.inputs.draw import torch_dtype
from loragate.matrix.case import Base, Case, Mix, Sharding
from loragate.oracles import ORACLES
from loragate.protocol import HotPath, Pool, Trial

ORACLE = ORACLES[OracleName.HOT_PATH]
PROMISES = {"hot_path": frozenset(HotPath), "allocates": lambda case: 0}
interpreted = pytest.mark.skipif(not interpreter_is_on(), reason="needs Triton's interpreter")


class Steady:
    """dense_delta with one matrix a slot, and a first one of zeros for base rows."""

    def __init__(self, case: Case) -> None:
        dtype = torch_dtype(case.dtype)
        width, depth = case.out_features, case.in_features
        self.table = torch.zeros(case.tokens, dtype=torch.int64)
        self.weights = torch.zeros(case.slots + 1, width, depth, dtype=dtype)
        self.chosen = torch.zeros(case.tokens, width, depth, dtype=dtype)
        self.delta = torch.zeros(case.tokens, width, 1, dtype=dtype)

    def load(self, slot: int, pool: Pool) -> None:
        factors = zip(pool.b, pool.ranks[slot], pool.scales[slot], strict=True)
        parts = [
            scale * b[slot][:, :rank].float() @ pool.a[slot, part, :rank].float()
            for part, (b, rank, scale) in enumerate(factors)
        ]
        self.weights[slot + 1].copy_(torch.cat(parts))

    def unload(self, slot: int) -> None:
        self.weights[slot + 1].zero_()

    def prepare(self, token_slots: Tensor) -> None:
        self.table.copy_(token_slots + 1, non_blocking=True)

    def apply(self, x: Tensor, out: Tensor) -> Tensor:
        torch.index_select(self.weights, 0, self.table, out=self.chosen)
        torch.bmm(self.chosen, x.unsqueeze(-1), out=self.delta)
        return out.add_(self.delta.squeeze(-1))


class AsksWhetherThereAreAdapters(Steady):
    def apply(self, x: Tensor, out: Tensor) -> Tensor:
        return out if self.table.max().item() == 0 else super().apply(x, out)


class ReadsItsOwnFlag(Steady):
    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.flag = torch.zeros(1, dtype=torch.bool)

    def apply(self, x: Tensor, out: Tensor) -> Tensor:
        return out if self.flag.item() else super().apply(x, out)


@torch.library.custom_op("loragate_test::largest_is_zero", mutates_args=())
def largest_is_zero(table: Tensor) -> bool:
    return not table.max().item()


class AsksInAnOperator(Steady):
    def apply(self, x: Tensor, out: Tensor) -> Tensor:
        return out if largest_is_zero(self.table) else super().apply(x, out)


class SelectsRowsByMask(Steady):
    def apply(self, x: Tensor, out: Tensor) -> Tensor:
        out[self.table > 0] += 0
        return super().apply(x, out)


class CountsInPrepare(Steady):
    def prepare(self, token_slots: Tensor) -> None:
        super().prepare(token_slots)
        self.active = int(self.table.count_nonzero())


class UploadsPageableMemory(Steady):
    def prepare(self, token_slots: Tensor) -> None:
        self.table.copy_(token_slots + 1)


class BufferForEachCall(Steady):
    def apply(self, x: Tensor, out: Tensor) -> Tensor:
        delta = torch.empty(len(x), out.shape[1], 1, dtype=x.dtype)
        torch.index_select(self.weights, 0, self.table, out=self.chosen)
        torch.bmm(self.chosen, x.unsqueeze(-1), out=delta)
        return out.add_(delta.squeeze(-1))


class TwoBuffersForEachCall(BufferForEachCall):
    def apply(self, x: Tensor, out: Tensor) -> Tensor:
        self.delta = torch.empty_like(self.delta)
        return super().apply(x, out)


class TableForEachStep(Steady):
    def prepare(self, token_slots: Tensor) -> None:
        self.table = torch.empty_like(self.table)
        super().prepare(token_slots)


class TwoTablesInTurn(Steady):
    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.next = torch.zeros_like(self.table)

    def prepare(self, token_slots: Tensor) -> None:
        self.table, self.next = self.next, self.table
        super().prepare(token_slots)


class WorkspaceOfTheFirstStep(Steady):
    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.chosen, self.delta = torch.empty(0), torch.empty(0)

    def apply(self, x: Tensor, out: Tensor) -> Tensor:
        # the same operator uses memory that was there before
        self.weights[0].zero_()
        if not self.chosen.numel():
            self.chosen = torch.zeros(len(x), *self.weights.shape[1:], dtype=x.dtype)
            self.delta = self.chosen.new_zeros(*out.shape, 1)
        self.chosen.zero_()
        return super().apply(x, out)


class WorkspaceOfEachStep(Steady):
    def apply(self, x: Tensor, out: Tensor) -> Tensor:
        self.delta = torch.zeros_like(self.delta)
        return super().apply(x, out)


class KeepsWhatEachStepGets(Steady):
    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.kept: list[Tensor] = []

    def apply(self, x: Tensor, out: Tensor) -> Tensor:
        self.kept.append(torch.zeros_like(self.delta))
        return super().apply(x, out)


class WorkspaceMovedByAPreparation(WorkspaceOfTheFirstStep):
    def prepare(self, token_slots: Tensor) -> None:
        super().prepare(token_slots)
        self.chosen = self.chosen.clone()


class AssignsNumbers(Steady):
    """To all elements, to rows, to none, and by a mask."""

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.mask = torch.zeros(case.tokens, dtype=torch.bool)

    def apply(self, x: Tensor, out: Tensor) -> Tensor:
        self.chosen[...] = 0
        self.delta[:2] = 1.0
        self.delta[:0] = 0
        torch.lt(self.table, 0, out=self.mask)
        out[self.mask] = 0.0
        return super().apply(x, out)


class AssignsANumberToOneElement(Steady):
    def apply(self, x: Tensor, out: Tensor) -> Tensor:
        self.delta[0, 0, 0] = 0
        return super().apply(x, out)


class AssignsANumberByIndices(Steady):
    def apply(self, x: Tensor, out: Tensor) -> Tensor:
        self.chosen[self.table] = 0
        return super().apply(x, out)


class ZeroForEachStep(Steady):
    def prepare(self, token_slots: Tensor) -> None:
        super().prepare(token_slots)
        self.zero = torch.zeros(())

    def apply(self, x: Tensor, out: Tensor) -> Tensor:
        self.chosen[...] = self.zero
        return super().apply(x, out)


class ZeroForSeveralOperators(Steady):
    def apply(self, x: Tensor, out: Tensor) -> Tensor:
        zero = torch.tensor(0.0)
        self.chosen.fill_(zero)
        self.delta.fill_(zero)
        return super().apply(x, out)


class WeightsMovedByALoad(Steady):
    def load(self, slot: int, pool: Pool) -> None:
        self.weights = self.weights.clone()
        super().load(slot, pool)


class WeightsMovedByAnEviction(Steady):
    def unload(self, slot: int) -> None:
        self.weights = self.weights.clone()
        super().unload(slot)


@pytest.mark.parametrize(
    ("instance", "failure", "message"),
    [
        (AsksWhetherThereAreAdapters, Failure.HOST_WAIT, "apply waits for the device 1 time"),
        (AsksInAnOperator, Failure.HOST_WAIT, "apply waits for the device 1 time: item"),
        (SelectsRowsByMask, Failure.HOST_WAIT, "apply waits for the device"),
        (CountsInPrepare, Failure.HOST_WAIT, "prepare waits for the device 1 time: _local_scalar"),
        (UploadsPageableMemory, Failure.HOST_WAIT, "prepare waits for the device 1 time: copy_"),
        (BufferForEachCall, Failure.ALLOCATION, "4224 bytes beside its result, 0 are allowed"),
        (TableForEachStep, Failure.MOVED_BUFFER, "index_select gets"),
        (TwoTablesInTurn, Failure.MOVED_BUFFER, "index_select gets"),
        (TwoTablesInTurn, Failure.MOVED_BUFFER, f"use the old one in apply, {__file__}:"),
        (WorkspaceOfEachStep, Failure.ALLOCATION, "4224 bytes beside its result, 0 are allowed"),
        (WorkspaceMovedByAPreparation, Failure.MOVED_BUFFER, "in other memory than before"),
        (AssignsANumberToOneElement, Failure.HOST_WAIT, "apply waits for the device 1 time: copy_"),
        (AssignsANumberByIndices, Failure.HOST_WAIT, "waits for the device 1 time: index_put_"),
        (ZeroForEachStep, Failure.MOVED_BUFFER, "fill_ gets tensor 1 in other memory"),
        (ZeroForSeveralOperators, Failure.MOVED_BUFFER, "fill_ gets tensor 1 in other memory"),
        (WeightsMovedByALoad, Failure.MOVED_BUFFER, "in a step behind the reload of an adapter"),
        (WeightsMovedByAnEviction, Failure.MOVED_BUFFER, "behind the reload of an adapter"),
    ],
)
def test_what_a_step_asks_of_the_host_once_too_often_fails(
    instance: type[Steady],
    failure: Failure,
    message: str,
    make_trial: Callable[..., Trial],
) -> None:
    for seed in range(5):
        judgement = ORACLE.judge(make_trial(instance, seed, PROMISES, mix=Mix.SHUFFLED))
        assert judgement.failure is failure, judgement
        assert message in judgement.message


def test_a_step_that_keeps_its_buffers_and_never_waits_passes(
    make_trial: Callable[..., Trial],
) -> None:
    for seed in range(20):
        judgement = ORACLE.judge(make_trial(Steady, seed, PROMISES, mix=Mix.SHUFFLED))
        assert judgement.verdict is Verdict.PASS, judgement


@pytest.mark.parametrize("instance", [WorkspaceOfTheFirstStep, AssignsNumbers])
def test_buffers_of_the_first_step_and_assigned_numbers_pass(
    instance: type[Steady], make_trial: Callable[..., Trial]
) -> None:
    for seed in range(5):
        judgement = ORACLE.judge(make_trial(instance, seed, PROMISES, mix=Mix.SHUFFLED))
        assert judgement.verdict is Verdict.PASS, judgement


def test_a_case_of_base_rows_only_has_no_step_that_could_keep_memory(
    make_trial: Callable[..., Trial],
) -> None:
    judgement = ORACLE.judge(make_trial(Steady, 0, PROMISES, mix=Mix.ALL_BASE))
    assert judgement.verdict is Verdict.PASS, judgement


def test_memory_that_each_step_keeps_fails_although_a_step_may_use_as_much(
    make_trial: Callable[..., Trial],
) -> None:
    promises = PROMISES | {"hot_path": frozenset(), "allocates": lambda case: 1 << 20}
    judgement = ORACLE.judge(make_trial(KeepsWhatEachStepGets, 0, promises))
    assert judgement.failure is Failure.ALLOCATION, judgement
    assert judgement.message.startswith("apply keeps 4224 bytes more after each step: result of")
    for instance in (BufferForEachCall, WorkspaceOfEachStep, WorkspaceOfTheFirstStep):
        assert ORACLE.judge(make_trial(instance, 0, promises)).verdict is Verdict.PASS


def test_buffers_of_a_step_count_together(make_trial: Callable[..., Trial]) -> None:
    # each of the two has as many bytes as a step may allocate
    for allowed, failure in ((4224, Failure.ALLOCATION), (2 * 4224, None)):
        promises = PROMISES | {"hot_path": frozenset(), "allocates": lambda case, n=allowed: n}
        judgement = ORACLE.judge(make_trial(TwoBuffersForEachCall, 1, promises, mix=Mix.SHUFFLED))
        assert judgement.failure is failure, judgement


def test_only_what_is_promised_is_judged_besides_waits_in_apply(
    make_trial: Callable[..., Trial],
) -> None:
    nothing = {"hot_path": frozenset()}
    assert ORACLE.applies(make_trial(Steady, promises=nothing)) is not None
    one = {"hot_path": frozenset({HotPath.SAME_KERNELS})}
    for instance in (CountsInPrepare, BufferForEachCall, TableForEachStep):
        assert ORACLE.judge(make_trial(instance, promises=one)).verdict is Verdict.PASS
    asks = make_trial(AsksWhetherThereAreAdapters, promises=one)
    assert ORACLE.judge(asks).failure is Failure.HOST_WAIT


def test_what_a_subject_says_is_on_the_host_is_read_without_a_wait(
    make_trial: Callable[..., Trial],
) -> None:
    on_host = PROMISES | {"host_tensors": lambda instance: [instance.flag]}
    judgement = ORACLE.judge(make_trial(ReadsItsOwnFlag, promises=on_host))
    assert judgement.verdict is Verdict.PASS, judgement
    reads = ORACLE.judge(make_trial(ReadsItsOwnFlag, promises=PROMISES))
    assert reads.failure is Failure.HOST_WAIT


def test_a_batch_without_rows_is_not_judged(make_trial: Callable[..., Trial]) -> None:
    assert ORACLE.applies(make_trial(Steady, promises=PROMISES, tokens=0)) == (
        "the batch has no rows"
    )


def test_a_base_layer_that_simulated_ranks_call_again_is_not_judged(
    make_trial: Callable[..., Trial],
) -> None:
    of_bases = [
        ORACLE.applies(make_trial(Steady, promises=PROMISES, sharding=Sharding.RANK, base=base))
        for base in (Base.WEIGHT, Base.CALLABLE)
    ]
    assert of_bases[0] is None
    assert "call their base layer again" in str(of_bases[1])


@triton.jit
def count_kernel(total_ptr, first, WARPS: tl.constexpr):  # type: ignore[no-untyped-def]
    tl.store(total_ptr, first + WARPS)


@triton.jit(do_not_specialize=["first"])
def plain_count_kernel(total_ptr, first, WARPS: tl.constexpr):  # type: ignore[no-untyped-def]
    tl.store(total_ptr, first + WARPS)


class HandsOverASlot(Steady):
    """A kernel gets the slot of the first row, which may be 1."""

    kernel = count_kernel

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.total = torch.zeros(1, dtype=torch.int32)
        self.first = 0

    def prepare(self, token_slots: Tensor) -> None:
        super().prepare(token_slots)
        self.first = int(token_slots[0])

    def warps(self) -> int:
        return 4

    def apply(self, x: Tensor, out: Tensor) -> Tensor:
        self.kernel[(1,)](self.total, self.first, WARPS=self.warps())
        return super().apply(x, out)


class HandsItOverPlainly(HandsOverASlot):
    kernel = plain_count_kernel


class ConstantForEachBatch(HandsItOverPlainly):
    def warps(self) -> int:
        return self.first


@interpreted
@pytest.mark.parametrize(
    ("instance", "argument"), [(ConstantForEachBatch, "WARPS"), (HandsOverASlot, "first")]
)
def test_a_kernel_that_each_batch_would_compile_anew_fails(
    instance: type[Steady], argument: str, make_trial: Callable[..., Trial]
) -> None:
    found = [
        ORACLE.judge(make_trial(instance, seed, PROMISES, mix=Mix.SHUFFLED)) for seed in range(20)
    ]
    wrong = [judgement for judgement in found if judgement.verdict is Verdict.FAIL]
    assert wrong
    for judgement in wrong:
        assert judgement.failure is Failure.RECOMPILED
        assert f"compiled anew for its {argument}" in judgement.message


@interpreted
def test_a_kernel_that_distinguishes_no_batches_passes(make_trial: Callable[..., Trial]) -> None:
    for seed in range(5):
        trial = make_trial(HandsItOverPlainly, seed, PROMISES, mix=Mix.SHUFFLED)
        judgement = ORACLE.judge(trial)
        assert judgement.verdict is Verdict.PASS, judgement
