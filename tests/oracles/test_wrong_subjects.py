"""Each numeric oracle fails the subjects with the defects that it is for, and no correct one.

A wrong subject is the torch subject with one change. For every seed the oracle must give FAIL with
the failure that names the kind of the defect: finding it by luck is not enough.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest
import torch
from torch import Tensor

from loragate.core.machine import Machine, select_interpreter
from loragate.core.verdict import Failure, Judgement, OracleName, Verdict
from loragate.inputs import DataKind
from loragate.matrix.case import Case, Dtype, Layout, Mix, Parallel, Ranks, Site
from loragate.oracles import ORACLES
from loragate.oracles.state.scenes import scenes
from loragate.protocol import BaseLayer, Capabilities, Instance, Pool, Trial
from loragate.subjects.torch.embedding import Embedding
from loragate.subjects.torch.subject import DenseDelta, TorchSubject

from .wrong_dense import (
    ChangesItsInput,
    CountsItsInstances,
    CountsItsRuns,
    DeltaForBaseRows,
    DependsOnTheRowsPlace,
    DependsOnTheSlotsNumber,
    FirstSlicesScale,
    KeepsAnAbsentSlice,
    KeepsTheFactorsItGets,
    KeepsTheMappingItGets,
    KnowsAMappingByItsCounts,
    KnowsAMappingByItsEnds,
    KnowsAMappingByItsSum,
    LastColumnIgnored,
    LastRankDropped,
    LoadsASlotOnce,
    LoadsWithoutReset,
    NeighboursA,
    OverwritesOutput,
    OverwritesZerosOfBaseRows,
    PreparesOnTop,
    ReadsBaseRows,
    ReadsDeadRanks,
    ReadsFreshMemory,
    ReadsUnusedSlots,
    RewritesOnlyRowsWithAdapter,
    ScaleOnePercentOff,
    ScaleWithoutItsSign,
    SharesItsMappingWithAllInstances,
    SharesItsScales,
    SkipsPrepareWithoutAdapters,
    TakesAScaleOfZeroForNone,
    UnloadDoesNothing,
    UnloadsTheNextSlotToo,
    UnloadsTheSlotBeforeToo,
    WipesInfOfTheBase,
    WipesNanOfTheBase,
    WritesAsManyRowsAsBefore,
    WritesPastTheLastColumn,
    ZeroAddedBehindTheFirstColumn,
    ZeroAddedToBaseRows,
    ZeroAddedToTheLastColumnOfSliceZero,
)

select_interpreter()
CPU = Machine("cpu", "test", None, 1, 0)
NUMERIC = (
    OracleName.REFERENCE,
    OracleName.EXACT,
    OracleName.BASE_ROWS,
    OracleName.CANARY,
    OracleName.REPEAT,
    OracleName.PERMUTE,
    OracleName.SEQUENCE,
)
CASE = Case(
    site=Site.DENSE_DELTA,
    tokens=18,
    in_features=48,
    slices=(24, 17),
    rank=8,
    slots=3,
    dtype=Dtype.FP32,
)


class Subject(TorchSubject):
    """The torch subject with instances of another class."""

    def __init__(self, instance: type[DenseDelta], **promises: Any) -> None:
        self.instance, self.promises = instance, promises

    def capabilities(self, machine: Machine) -> Capabilities:
        have = super().capabilities(machine)
        assert not isinstance(have, str)
        return replace(have, **self.promises)

    def open(self, case: Case, machine: Machine, base: BaseLayer | None) -> Instance:
        if base is not None:
            return super().open(case, machine, base)
        return self.instance(case)


def judge(subject: Subject, oracle: OracleName, seed: int, case: Case = CASE) -> Judgement:
    trial = Trial(case, subject, subject.capabilities(CPU), CPU, seed)
    assert ORACLES[oracle].applies(trial) is None
    return ORACLES[oracle].judge(trial)


WRONG = [
    (OracleName.REFERENCE, Failure.WRONG_ANSWER, NeighboursA),
    (OracleName.REFERENCE, Failure.WRONG_ANSWER, LastColumnIgnored),
    (OracleName.REFERENCE, Failure.WRONG_ANSWER, LastRankDropped),
    (OracleName.REFERENCE, Failure.WRONG_ANSWER, ScaleOnePercentOff),
    (OracleName.REFERENCE, Failure.WRONG_ANSWER, FirstSlicesScale),
    (OracleName.REFERENCE, Failure.WRONG_ANSWER, OverwritesOutput),
    (OracleName.EXACT, Failure.WRONG_ANSWER, NeighboursA),
    (OracleName.EXACT, Failure.WRONG_ANSWER, LastColumnIgnored),
    (OracleName.EXACT, Failure.WRONG_ANSWER, LastRankDropped),
    (OracleName.EXACT, Failure.WRONG_ANSWER, ScaleOnePercentOff),
    (OracleName.EXACT, Failure.WRONG_ANSWER, FirstSlicesScale),
    (OracleName.EXACT, Failure.WRONG_ANSWER, OverwritesOutput),
    (OracleName.BASE_ROWS, Failure.BASE_ROW_CHANGED, DeltaForBaseRows),
    (OracleName.BASE_ROWS, Failure.BASE_ROW_CHANGED, ZeroAddedToBaseRows),
    (OracleName.BASE_ROWS, Failure.BASE_ROW_CHANGED, ZeroAddedBehindTheFirstColumn),
    (OracleName.BASE_ROWS, Failure.BASE_ROW_CHANGED, ZeroAddedToTheLastColumnOfSliceZero),
    (OracleName.BASE_ROWS, Failure.BASE_ROW_CHANGED, WipesNanOfTheBase),
    (OracleName.BASE_ROWS, Failure.BASE_ROW_CHANGED, WipesInfOfTheBase),
    (OracleName.CANARY, Failure.FOREIGN_MEMORY, WritesPastTheLastColumn),
    (OracleName.CANARY, Failure.FOREIGN_MEMORY, ReadsDeadRanks),
    (OracleName.CANARY, Failure.FOREIGN_MEMORY, ChangesItsInput),
    (OracleName.CANARY, Failure.FOREIGN_MEMORY, ReadsBaseRows),
    (OracleName.CANARY, Failure.FOREIGN_MEMORY, ReadsUnusedSlots),
    (OracleName.CANARY, Failure.FOREIGN_MEMORY, ReadsFreshMemory),
    (OracleName.REPEAT, Failure.NONDETERMINISTIC, CountsItsRuns),
    (OracleName.REPEAT, Failure.NONDETERMINISTIC, CountsItsInstances),
    (OracleName.REPEAT, Failure.NONDETERMINISTIC, KeepsTheMappingItGets),
    (OracleName.REPEAT, Failure.NONDETERMINISTIC, KeepsTheFactorsItGets),
    (OracleName.SEQUENCE, Failure.STALE_STATE, PreparesOnTop),
    (OracleName.PERMUTE, Failure.NOT_EQUIVARIANT, DependsOnTheRowsPlace),
    (OracleName.PERMUTE, Failure.NOT_EQUIVARIANT, DependsOnTheSlotsNumber),
    (OracleName.SEQUENCE, Failure.STALE_STATE, RewritesOnlyRowsWithAdapter),
    (OracleName.SEQUENCE, Failure.STALE_STATE, SkipsPrepareWithoutAdapters),
    (OracleName.SEQUENCE, Failure.STALE_STATE, LoadsWithoutReset),
    (OracleName.SEQUENCE, Failure.STALE_STATE, UnloadDoesNothing),
    (OracleName.SEQUENCE, Failure.STALE_STATE, LoadsASlotOnce),
    (OracleName.SEQUENCE, Failure.STALE_STATE, TakesAScaleOfZeroForNone),
    (OracleName.SEQUENCE, Failure.STALE_STATE, UnloadsTheNextSlotToo),
    (OracleName.SEQUENCE, Failure.STALE_STATE, UnloadsTheSlotBeforeToo),
    (OracleName.SEQUENCE, Failure.STALE_STATE, KnowsAMappingByItsCounts),
    (OracleName.SEQUENCE, Failure.STALE_STATE, KnowsAMappingByItsSum),
    (OracleName.SEQUENCE, Failure.STALE_STATE, SharesItsMappingWithAllInstances),
    (OracleName.SEQUENCE, Failure.STALE_STATE, SharesItsScales),
    (OracleName.SEQUENCE, Failure.STALE_STATE, WritesAsManyRowsAsBefore),
]


@pytest.mark.parametrize(
    ("oracle", "failure", "instance"),
    [pytest.param(*row, id=f"{row[0]}-{row[2].__name__}") for row in WRONG],
)
def test_an_oracle_fails_a_subject_with_its_defect_for_every_seed(
    oracle: OracleName, failure: Failure, instance: type[DenseDelta]
) -> None:
    for seed in range(6):
        judgement = judge(Subject(instance), oracle, seed)
        assert (judgement.verdict, judgement.failure) == (Verdict.FAIL, failure), (seed, judgement)


@pytest.mark.parametrize("oracle", NUMERIC)
def test_a_zero_that_is_added_to_base_rows_passes_where_the_subject_says_so(
    oracle: OracleName,
) -> None:
    for seed in range(6):
        said = Subject(ZeroAddedToBaseRows, adds_zero_to_base_rows=True)
        assert judge(said, oracle, seed).verdict is Verdict.PASS


@pytest.mark.parametrize("instance", [DeltaForBaseRows, OverwritesZerosOfBaseRows])
def test_no_other_delta_of_base_rows_passes_for_a_subject_that_adds_zero_to_them(
    instance: type[DenseDelta],
) -> None:
    for seed in range(6):
        said = Subject(instance, adds_zero_to_base_rows=True)
        judgement = judge(said, OracleName.BASE_ROWS, seed)
        assert judgement.failure is Failure.BASE_ROW_CHANGED, (seed, judgement)


def test_a_slot_that_cannot_be_emptied_again_fails() -> None:
    class UnloadsOnce(DenseDelta):
        unloaded: frozenset[int] = frozenset()

        def load(self, slot: int, pool: Pool) -> None:
            super().load(slot, pool)
            self.unloaded -= {slot}

        def unload(self, slot: int) -> None:
            if slot in self.unloaded:
                raise KeyError(f"slot {slot} is empty")
            self.unloaded |= {slot}
            super().unload(slot)

    with pytest.raises(KeyError, match="slot 2 is empty"):
        judge(Subject(UnloadsOnce), OracleName.SEQUENCE, 0)


def test_a_slot_that_cannot_be_emptied_before_its_first_adapter_fails() -> None:
    class UnloadsWhatWasLoaded(DenseDelta):
        ever: frozenset[int] = frozenset()

        def load(self, slot: int, pool: Pool) -> None:
            super().load(slot, pool)
            self.ever |= {slot}

        def unload(self, slot: int) -> None:
            if slot not in self.ever:
                raise KeyError(f"slot {slot} has had no adapter")
            super().unload(slot)

    with pytest.raises(KeyError, match="slot 0 has had no adapter"):
        judge(Subject(UnloadsWhatWasLoaded), OracleName.SEQUENCE, 0)


def test_a_subject_in_inference_mode_passes() -> None:
    class Infers(DenseDelta):
        def apply(self, x: Tensor, out: Tensor) -> Tensor:
            with torch.inference_mode():
                return super().apply(x, out)

    class InfersIds(Embedding):
        def apply(self, x: Tensor, out: Tensor) -> Tensor:
            with torch.inference_mode():
                return super().apply(x, out)

    class Embeds(TorchSubject):
        def open(self, case: Case, machine: Machine, base: BaseLayer | None) -> Instance:
            assert base is not None
            return InfersIds(case, base)

    case = replace(CASE, site=Site.EMBEDDING, slices=(24,))
    for oracle in (OracleName.REPEAT, OracleName.SEQUENCE, OracleName.ISOLATION):
        assert judge(Subject(Infers), oracle, 0).verdict is Verdict.PASS
        assert judge(Embeds(), oracle, 0, case).verdict is Verdict.PASS


def test_a_result_in_memory_that_a_later_step_writes_fails() -> None:
    class OneResult(Embedding):
        result: Tensor | None = None

        def apply(self, x: Tensor, out: Tensor) -> Tensor:
            fresh = super().apply(x, out)
            self.result = fresh if self.result is None else self.result.copy_(fresh)
            return self.result

    class Embeds(TorchSubject):
        def open(self, case: Case, machine: Machine, base: BaseLayer | None) -> Instance:
            assert base is not None
            return OneResult(case, base)

    case = replace(CASE, site=Site.EMBEDDING, slices=(24,))
    wrong = judge(Embeds(), OracleName.REPEAT, 0, case)
    assert (wrong.verdict, wrong.failure) == (Verdict.FAIL, Failure.FOREIGN_MEMORY)
    assert wrong.message == "a later step wrote 432 elements of the result of the first"


def test_a_slice_that_is_kept_where_the_new_adapter_has_none_is_stale() -> None:
    # of two slices with mixed ranks the last slot lacks one already, so there is none to keep
    case = replace(CASE, ranks=Ranks.FULL)
    for seed in range(6):
        judgement = judge(Subject(KeepsAnAbsentSlice), OracleName.SEQUENCE, seed, case)
        assert judgement.failure is Failure.STALE_STATE, (seed, judgement)
        assert "smaller adapter in place of a larger one" in judgement.message


@pytest.mark.parametrize("oracle", [OracleName.REFERENCE, OracleName.EXACT])
def test_a_scale_without_its_sign_is_wrong(oracle: OracleName) -> None:
    # of mixed ranks the slices that a batch uses may all have positive scales
    case = replace(CASE, ranks=Ranks.FULL)
    for seed in range(6):
        judgement = judge(Subject(ScaleWithoutItsSign), oracle, seed, case)
        assert judgement.failure is Failure.WRONG_ANSWER, (seed, judgement)


@pytest.mark.parametrize("dtype", [Dtype.FP16, Dtype.BF16])
@pytest.mark.parametrize("instance", [NeighboursA, LastColumnIgnored, LastRankDropped])
@pytest.mark.parametrize("oracle", [OracleName.REFERENCE, OracleName.EXACT])
def test_a_narrow_dtype_hides_no_wrong_index(
    oracle: OracleName, instance: type[DenseDelta], dtype: Dtype
) -> None:
    for seed in range(6):
        judgement = judge(Subject(instance), oracle, seed, replace(CASE, dtype=dtype))
        assert judgement.failure is Failure.WRONG_ANSWER, (seed, judgement)


def test_a_wrong_answer_is_located_in_the_terms_of_the_user() -> None:
    class OneElement(DenseDelta):
        def apply(self, x: Tensor, out: Tensor) -> Tensor:
            super().apply(x, out)
            out[7, 30] += 1
            return out

    where = judge(Subject(OneElement), OracleName.EXACT, 0).where
    # column 30 is column 6 of the second slice, which is 24 columns in
    assert (where["token"], where["slice"], where["column"]) == (7, 1, 6)


RIGHT = {
    "plain": CASE,
    "column_slice": replace(CASE, layout=Layout.COLUMN_SLICE, mix=Mix.SHUFFLED),
    "padded_rows": replace(CASE, layout=Layout.PADDED_ROWS, mix=Mix.LAST_SLOT),
    "transposed": replace(CASE, layout=Layout.TRANSPOSED),
    "column_parallel": replace(
        CASE, site=Site.LORA_LINEAR, slices=(24, 16), parallel=Parallel.COLUMN, tp=2
    ),
    "row_parallel": replace(CASE, site=Site.LORA_LINEAR, parallel=Parallel.ROW, tp=2),
}


@pytest.mark.parametrize("dtype", Dtype)
@pytest.mark.parametrize("name", RIGHT)
def test_no_oracle_fails_the_correct_subject(name: str, dtype: Dtype) -> None:
    case, subject = replace(RIGHT[name], dtype=dtype), Subject(DenseDelta)
    for seed in range(10):
        for oracle in NUMERIC:
            judgement = judge(subject, oracle, seed, case)
            assert judgement.verdict is Verdict.PASS, (seed, judgement)


def test_equal_bits_are_required_only_of_a_subject_that_promises_them() -> None:
    subject = Subject(CountsItsRuns, deterministic=False)
    trial = Trial(CASE, subject, subject.capabilities(CPU), CPU, 0)
    assert "does not promise" in (ORACLES[OracleName.REPEAT].applies(trial) or "")


def test_a_subject_that_needs_dead_ranks_to_be_zero_gets_them() -> None:
    subject = Subject(ReadsDeadRanks, skips_dead_ranks=False)
    for oracle in NUMERIC:
        assert judge(subject, oracle, 3).verdict is Verdict.PASS


@pytest.mark.parametrize("seed", range(6))
def test_rows_move_between_others_that_stay(seed: int) -> None:
    # in a batch without runs there are different slots in the middle
    case = replace(CASE, mix=Mix.SHUFFLED, tokens=40)
    judgement = judge(Subject(KnowsAMappingByItsEnds), OracleName.SEQUENCE, seed, case)
    assert judgement.failure is Failure.STALE_STATE
    assert "the same slots for other rows" in judgement.message


@pytest.mark.parametrize("slots", [1, 2, 3, 5])
def test_slots_whose_rows_move_have_an_adapter_each_of_their_own(slots: int) -> None:
    case = replace(CASE, slots=slots)
    subject = Subject(DenseDelta)
    trial = Trial(case, subject, subject.capabilities(CPU), CPU, 0)
    resident: dict[int, Pool | None] = {}
    for scene in scenes(trial, DataKind.EXACT):
        resident |= scene.loads
        if scene.moved_rows:
            loaded = [pool.a[slot] for slot, pool in resident.items() if pool is not None]
            assert len(loaded) == max(1, slots - 1)
            assert not any(torch.equal(*pair) for pair in combinations(loaded, 2))
            return
    pytest.fail("no scene moves rows")
