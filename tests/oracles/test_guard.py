from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from loragate.core.machine import Machine
from loragate.core.verdict import Failure, Judgement, Verdict
from loragate.inputs import torch_dtype
from loragate.matrix.case import Case, Dtype, Execution, Site
from loragate.oracles.contract import guard as guard_module
from loragate.oracles.contract.guard import GuardedInput, _names
from loragate.protocol import BaseLayer, Capabilities, Guard, Instance, Pool, Trial
from loragate.subjects.torch.subject import DenseDelta, TorchSubject

CPU = Machine("cpu", "test", None, 1, 0)
CASE = Case(
    site=Site.DENSE_DELTA,
    tokens=9,
    in_features=48,
    slices=(32, 16),
    rank=8,
    slots=3,
    dtype=Dtype.BF16,
)


def _require(name: str, given: object, allowed: object) -> None:
    if given != allowed:
        raise ValueError(f"{name} must be {allowed} (got {given})")


class Careful(DenseDelta):
    """Refuses every bad input before it changes anything."""

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.case = case

    def load(self, slot: int, pool: Pool) -> None:
        self.check_slot(slot)
        self.check_rank(pool.ranks[slot])
        _require("in_features", pool.a.shape[-1], self.case.in_features)
        for b, width in zip(pool.b, self.case.slices, strict=True):
            _require("slice width", b.shape[1], width)
        super().load(slot, pool)

    def unload(self, slot: int) -> None:
        self.check_slot(slot)
        super().unload(slot)

    def prepare(self, token_slots: Tensor) -> None:
        self.check_mapping(token_slots)
        super().prepare(token_slots)

    def apply(self, x: Tensor, out: Tensor) -> Tensor:
        self.check_rows(x, out)
        self.check_memory(x, out)
        return super().apply(x, out)

    def check_slot(self, slot: int) -> None:
        if not 0 <= slot < self.case.slots:
            raise ValueError(f"slot must be 0 to {self.case.slots - 1} (got {slot})")

    def check_rank(self, ranks: tuple[int, ...]) -> None:
        if max(ranks) > self.case.rank:
            raise ValueError(f"rank must be at most {self.case.rank} (got {max(ranks)})")

    def check_mapping(self, token_slots: Tensor) -> None:
        _require("dtype of token_slots", token_slots.dtype, torch.int32)
        self.check_strides(token_slots)
        if len(token_slots) > self.case.tokens:
            raise ValueError(f"at most {self.case.tokens} token_slots (got {len(token_slots)})")
        low, high = token_slots.aminmax()
        if low < -1 or high >= self.case.slots:
            raise ValueError(f"token_slots must name a slot or -1 (got {low} to {high})")

    def check_strides(self, token_slots: Tensor) -> None:
        if not token_slots.is_contiguous():
            raise ValueError("token_slots must be contiguous")

    def check_rows(self, x: Tensor, out: Tensor) -> None:
        for name, tensor, width in (
            ("x", x, self.case.in_features),
            ("out", out, self.case.out_features),
        ):
            _require(f"columns of {name}", tensor.shape[1], width)
            _require(f"dtype of {name}", tensor.dtype, torch_dtype(self.case.dtype))
            _require(f"rows of {name}", len(tensor), len(self.token_slots))

    def check_memory(self, x: Tensor, out: Tensor) -> None:
        distance = out.data_ptr() - x.data_ptr()
        if 0 <= distance < x.numel() * x.element_size():
            raise ValueError(f"out must not share memory with x (got {distance} bytes apart)")


class AnyXDtype(Careful):
    def check_rows(self, x: Tensor, out: Tensor) -> None:
        super().check_rows(x.to(out.dtype), out)


class NarrowX(Careful):
    def check_rows(self, x: Tensor, out: Tensor) -> None:
        _require("rows of x", len(x), len(self.token_slots))
        super().check_rows(out.new_empty(len(out), self.case.in_features).to(x.dtype), out)


class MoreRows(Careful):
    def check_rows(self, x: Tensor, out: Tensor) -> None:
        super().check_rows(x[: self.case.tokens], out[: self.case.tokens])


class AnyOutDtype(Careful):
    def check_rows(self, x: Tensor, out: Tensor) -> None:
        super().check_rows(x, out.to(x.dtype))


class NarrowOut(Careful):
    def check_rows(self, x: Tensor, out: Tensor) -> None:
        super().check_rows(x, out.new_empty(len(out), self.case.out_features))


class SameMemory(Careful):
    def check_memory(self, x: Tensor, out: Tensor) -> None:
        if x.data_ptr() != out.data_ptr():
            super().check_memory(x, out)


class OverlappingMemory(Careful):
    def check_memory(self, x: Tensor, out: Tensor) -> None:
        if x.data_ptr() == out.data_ptr():
            raise ValueError("out must not be x")


class WideMapping(Careful):
    def check_mapping(self, token_slots: Tensor) -> None:
        super().check_mapping(token_slots.int())


class StridedMapping(Careful):
    def check_strides(self, token_slots: Tensor) -> None:
        """Reads the mapping as if its elements were neighbours."""


class LongMapping(Careful):
    def check_mapping(self, token_slots: Tensor) -> None:
        super().check_mapping(token_slots[: self.case.tokens])


class ForeignSlot(Careful):
    def check_mapping(self, token_slots: Tensor) -> None:
        # the copy that follows is contiguous
        self.check_strides(token_slots)
        super().check_mapping(token_slots.clamp(max=self.case.slots - 1))


class OneSlotTooMany(Careful):
    def check_mapping(self, token_slots: Tensor) -> None:
        self.check_strides(token_slots)
        is_next = token_slots == self.case.slots
        super().check_mapping(torch.where(is_next, self.case.slots - 1, token_slots))


class NegativeSlot(Careful):
    def check_mapping(self, token_slots: Tensor) -> None:
        # the copy that follows is contiguous
        self.check_strides(token_slots)
        super().check_mapping(token_slots.clamp(min=-1))


class HighRank(Careful):
    def check_rank(self, ranks: tuple[int, ...]) -> None:
        """Accepts a rank that exceeds the buffers."""


class LastSlotByMinusOne(Careful):
    def check_slot(self, slot: int) -> None:
        super().check_slot(slot % self.case.slots if slot < 0 else slot)


class ForgetsTheMapping(Careful):
    """Installs a mapping before it checks it."""

    def prepare(self, token_slots: Tensor) -> None:
        self.token_slots = token_slots.clone()
        super().prepare(token_slots)


class HalfAnAdapter(Careful):
    """Empties the slot before it checks the new adapter (sglang #8103)."""

    def load(self, slot: int, pool: Pool) -> None:
        self.slots.pop(slot, None)
        super().load(slot, pool)


class WritesFirst(Careful):
    def apply(self, x: Tensor, out: Tensor) -> Tensor:
        out += 1
        super().apply(x, out - 1)
        return out


class WrongError(Careful):
    def check_rank(self, ranks: tuple[int, ...]) -> None:
        assert max(ranks) <= self.case.rank


class SilentError(Careful):
    def check_rank(self, ranks: tuple[int, ...]) -> None:
        if max(ranks) > self.case.rank:
            raise ValueError("bad adapter")


class NamesTheDeviceInstead(Careful):
    def check_slot(self, slot: int) -> None:
        if not 0 <= slot < self.case.slots:
            raise ValueError(f"bad slot on cuda:{slot}, slot1 of 1{slot} or 0.{slot}")


class SaysWithout(Careful):
    def check_memory(self, x: Tensor, out: Tensor) -> None:
        try:
            super().check_memory(x, out)
        except ValueError as error:
            raise ValueError("this kernel works without a copy") from error


class _Subject(TorchSubject):
    def __init__(self, instance: type[Careful]) -> None:
        self.instance = instance

    def open(self, case: Case, machine: Machine, base: BaseLayer | None) -> Instance:
        return self.instance(case)


def _trial(instance: type[Careful], case: Case = CASE, *guards: Guard) -> Trial:
    subject = _Subject(instance)
    capabilities = subject.capabilities(CPU)
    assert isinstance(capabilities, Capabilities)
    capabilities = replace(capabilities, guards=frozenset(guards or Guard))
    return Trial(case, subject, capabilities, CPU, seed=5)


def _judge(instance: type[Careful], case: Case = CASE) -> Judgement:
    return GuardedInput().judge(_trial(instance, case))


@pytest.mark.parametrize(
    ("case", "refusals"),
    [
        (CASE, 20.0),
        (replace(CASE, dtype=Dtype.FP32), 20.0),
        # one row cannot be one row too few, and has no strides
        (replace(CASE, tokens=1, slots=1, slices=(7,), in_features=2, rank=1), 18.0),
    ],
    ids=["bf16", "fp32", "smallest"],
)
def test_a_subject_that_refuses_everything_passes(case: Case, refusals: float) -> None:
    judgement = _judge(Careful, case)
    assert judgement.verdict is Verdict.PASS, judgement.message
    assert judgement.metrics == {"refusals": refusals}


@pytest.mark.parametrize(
    ("instance", "guard"),
    [
        (AnyXDtype, Guard.X_DTYPE),
        (NarrowX, Guard.X_WIDTH),
        (MoreRows, Guard.ROWS),
        (AnyOutDtype, Guard.OUT_DTYPE),
        (NarrowOut, Guard.OUT_WIDTH),
        (SameMemory, Guard.ALIASED_OUT),
        (OverlappingMemory, Guard.OVERLAPPING_OUT),
        (WideMapping, Guard.MAPPING_DTYPE),
        (StridedMapping, Guard.MAPPING_STRIDES),
        (LongMapping, Guard.MAPPING_LENGTH),
        (ForeignSlot, Guard.SLOT_RANGE),
        (OneSlotTooMany, Guard.SLOT_RANGE),
        (NegativeSlot, Guard.SLOT_RANGE),
        (HighRank, Guard.ADAPTER_RANK),
        (LastSlotByMinusOne, Guard.SLOT),
    ],
)
def test_bad_input_that_is_accepted_in_spite_of_a_promise_fails(
    instance: type[Careful], guard: Guard
) -> None:
    judgement = _judge(instance)
    assert judgement.failure is Failure.NOT_REFUSED
    assert judgement.where == {"guard": guard.value}


@pytest.mark.parametrize(
    "guard",
    [Guard.MAPPING_DTYPE, Guard.MAPPING_LENGTH, Guard.MAPPING_STRIDES, Guard.SLOT_RANGE],
)
def test_a_refused_mapping_that_was_installed_anyway_fails(guard: Guard) -> None:
    judgement = GuardedInput().judge(_trial(ForgetsTheMapping, CASE, guard))
    assert judgement.failure is Failure.STALE_STATE
    assert "token_slots" in judgement.message or "a row of slot" in judgement.message


def test_a_slot_that_a_refused_adapter_has_emptied_fails() -> None:
    judgement = _judge(HalfAnAdapter)
    assert judgement.failure is Failure.STALE_STATE
    assert "an adapter of rank 9" in judgement.message
    assert judgement.where["slot"] == CASE.slots - 1


def test_a_tensor_that_is_written_before_the_refusal_fails() -> None:
    judgement = _judge(WritesFirst)
    assert judgement.failure is Failure.NOT_REFUSED
    assert "refused after a tensor had been changed" in judgement.message


class WritesOneElementFirst(Careful):
    """Behind the last column of the last row."""

    def check_rows(self, x: Tensor, out: Tensor) -> None:
        if x.dtype != out.dtype:
            rows, columns = out.shape
            out.as_strided((1,), (1,), out.storage_offset() + rows * columns).fill_(0)
        super().check_rows(x, out)


def test_a_single_element_around_a_tensor_that_is_written_before_the_refusal_fails() -> None:
    judgement = _judge(WritesOneElementFirst)
    assert (judgement.failure, judgement.where) == (Failure.NOT_REFUSED, {"guard": "x_dtype"})
    assert "refused after a tensor had been changed" in judgement.message


class BreaksWhenItRefuses(Careful):
    """No step works behind a refusal."""

    is_broken = False

    def check_rows(self, x: Tensor, out: Tensor) -> None:
        self.is_broken |= x.dtype != out.dtype
        super().check_rows(x, out)
        if self.is_broken:
            raise RuntimeError("out of order")


def test_a_valid_step_that_raises_behind_a_refusal_fails() -> None:
    judgement = _judge(BreaksWhenItRefuses)
    assert judgement.failure is Failure.STALE_STATE
    assert "a valid step after it raises RuntimeError: out of order" in judgement.message


class RefusesOnce(Careful):
    """Makes what is missing on the way to a refusal, and finds it the next time."""

    refused = False

    def check_rows(self, x: Tensor, out: Tensor) -> None:
        if x.dtype == out.dtype or not self.refused:
            self.refused = x.dtype != out.dtype
            super().check_rows(x, out)
        else:
            super().check_rows(x.to(out.dtype), out)


def test_bad_input_that_is_accepted_when_it_is_given_again_fails() -> None:
    judgement = _judge(RefusesOnce)
    assert (judgement.failure, judgement.where) == (Failure.NOT_REFUSED, {"guard": "x_dtype"})
    assert judgement.message.endswith("it was accepted, when it was given again")


def test_another_kind_of_error_is_no_refusal() -> None:
    judgement = _judge(WrongError)
    assert judgement.failure is Failure.NOT_REFUSED
    assert "AssertionError instead of ValueError" in judgement.message


class AcceptsAndCopies(Careful):
    """Takes any x, and returns what the protocol does not allow."""

    def check_rows(self, x: Tensor, out: Tensor) -> None:
        pass

    def apply(self, x: Tensor, out: Tensor) -> Tensor:
        result = super().apply(x, out)
        return result if x.dtype == out.dtype else result.double()


def test_bad_input_that_gets_a_malformed_answer_was_accepted() -> None:
    judgement = _judge(AcceptsAndCopies)
    assert (judgement.failure, judgement.where) == (Failure.NOT_REFUSED, {"guard": "x_dtype"})
    assert judgement.message.endswith("it was accepted")


def test_an_error_of_the_harness_is_no_refusal_and_no_failure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(instance: object, batch: object) -> Tensor:
        raise KeyError("planted in the harness")

    trial = _trial(Careful, CASE, Guard.X_DTYPE)
    sound = guard_module.violations
    monkeypatch.setattr(
        guard_module,
        "violations",
        lambda *given: (replace(v, call=partial(broken, None, None)) for v in sound(*given)),
    )
    with pytest.raises(KeyError, match="planted in the harness"):
        GuardedInput().judge(trial)


def test_an_error_that_does_not_name_what_was_given_is_no_refusal() -> None:
    judgement = _judge(SilentError)
    assert judgement.failure is Failure.NOT_REFUSED
    assert "does not name 9: bad adapter" in judgement.message


@pytest.mark.parametrize(
    ("instance", "given"), [(NamesTheDeviceInstead, CASE.slots), (SaysWithout, "out")]
)
def test_an_error_with_what_was_given_only_inside_other_words_is_no_refusal(
    instance: type[Careful], given: object
) -> None:
    judgement = _judge(instance)
    assert judgement.failure is Failure.NOT_REFUSED
    assert f"does not name {given}: " in judgement.message


@pytest.mark.parametrize(
    ("message", "given"),
    [
        ("token_slots must be -1 to 3 (got -2 to 1)", "-2"),
        ("must be torch.int32 (got torch.int64)", "int64"),
        ("got [48, 9].", "9"),
        ("slot=3, not 3.", "3"),
        ("out: must not overlap", "out"),
    ],
)
def test_an_error_may_name_what_was_given_in_any_notation(message: str, given: str) -> None:
    assert _names(message, given)


def test_too_little_memory_after_a_refusal_is_no_failure_of_the_subject(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    steps = iter(range(100))
    apply = Careful.apply

    def full(layer: Careful, x: Tensor, out: Tensor) -> Tensor:
        # the first step is the one that all later ones are compared with
        if x.dtype is out.dtype and next(steps):
            raise MemoryError("no memory left")
        return apply(layer, x, out)

    monkeypatch.setattr(Careful, "apply", full)
    with pytest.raises(MemoryError):
        GuardedInput().judge(_trial(HighRank, CASE, Guard.X_DTYPE))


def test_a_refusal_that_was_not_promised_is_not_checked() -> None:
    judgement = GuardedInput().judge(_trial(HighRank, CASE, Guard.X_DTYPE))
    assert judgement.verdict is Verdict.PASS
    assert judgement.metrics == {"refusals": 1.0}


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        (replace(CASE, execution=Execution.GRAPH), "input is checked on the host"),
        (replace(CASE, tokens=0), "the batch has no rows"),
        (replace(CASE, tp=2), "before ranks are simulated"),
    ],
)
def test_a_case_that_would_show_nothing_new_is_skipped_with_a_reason(
    case: Case, reason: str
) -> None:
    assert reason in str(GuardedInput().applies(_trial(Careful, case)))


def test_a_subject_without_promises_is_skipped_with_a_reason() -> None:
    trial = _trial(Careful)
    trial = replace(trial, capabilities=replace(trial.capabilities, guards=frozenset()))
    assert GuardedInput().applies(trial) == "the subject promises no refusals"
