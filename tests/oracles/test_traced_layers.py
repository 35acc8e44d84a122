from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from loragate.core.machine import Machine, select_interpreter

select_interpreter()

from loragate.core.verdict import Failure, Judgement, Verdict  # noqa: E402
from loragate.inputs import torch_dtype  # noqa: E402
from loragate.matrix.case import Case, Dtype, Execution, Site  # noqa: E402
from loragate.oracles.contract.compile import Compile  # noqa: E402
from loragate.protocol import (  # noqa: E402
    BaseLayer,
    Capabilities,
    Instance,
    Pool,
    Trial,
)
from loragate.subjects.torch.subject import TorchSubject  # noqa: E402

CPU = Machine("cpu", "test", None, 1, 0)
CASE = Case(
    site=Site.DENSE_DELTA, tokens=7, in_features=16, slices=(8,), rank=4, slots=3, dtype=Dtype.FP32
)


def _delta(x: Tensor, a: Tensor, b: Tensor, scales: Tensor, rows: Tensor) -> Tensor:
    slots = rows.clamp(min=0)
    shrunk = torch.einsum("tk,trk->tr", x.float(), a[slots].float())
    delta = torch.einsum("tr,tnr->tn", shrunk, b[slots].float()) * scales[slots, None]
    return torch.where(rows[:, None] >= 0, delta, 0.0).to(x.dtype)


@torch.library.custom_op("toy::honest", mutates_args=("out",))
def honest(x: Tensor, a: Tensor, b: Tensor, s: Tensor, rows: Tensor, out: Tensor) -> None:
    out += _delta(x, a, b, s, rows)


@torch.library.custom_op("toy::named", mutates_args=("out",))
def named(x: Tensor, a: Tensor, b: Tensor, s: Tensor, rows: Tensor, out: Tensor, name: str) -> None:
    out += _delta(x, a, b, s, rows)


@torch.library.custom_op("toy::counted", mutates_args=("out",))
def counted(
    x: Tensor, a: Tensor, b: Tensor, s: Tensor, rows: Tensor, out: Tensor, active: int
) -> None:
    out += _delta(x, a, b, s, rows)


@torch.library.custom_op("toy::liar", mutates_args=())
def liar(x: Tensor, a: Tensor, b: Tensor, s: Tensor, rows: Tensor, out: Tensor) -> None:
    out += _delta(x, a, b, s, rows)


@torch.library.custom_op("toy::misshapen", mutates_args=())
def misshapen(x: Tensor, a: Tensor, b: Tensor, s: Tensor, rows: Tensor) -> Tensor:
    return _delta(x, a, b, s, rows)


@misshapen.register_fake
def _(x: Tensor, a: Tensor, b: Tensor, s: Tensor, rows: Tensor) -> Tensor:
    return torch.empty_like(x)


class Honest:
    numbers: Iterator[int] = count()

    def __init__(self, case: Case) -> None:
        dtype = torch_dtype(case.dtype)
        self.name = f"layers.{next(self.numbers)}.qkv"
        self.a = torch.zeros(case.slots, case.rank, case.in_features, dtype=dtype)
        self.b = torch.zeros(case.slots, case.out_features, case.rank, dtype=dtype)
        self.scales = torch.zeros(case.slots)
        self.rows = torch.empty(0, dtype=torch.int64)
        self.active = 0

    def load(self, slot: int, pool: Pool) -> None:
        self.a[slot] = pool.a[slot, 0]
        self.b[slot] = pool.b[0][slot]
        self.scales[slot] = pool.scales[slot][0]

    def unload(self, slot: int) -> None:
        self.scales[slot] = 0

    def prepare(self, token_slots: Tensor) -> None:
        self.rows = token_slots.long()
        self.active = len(set(token_slots.tolist()) - {-1})

    def apply(self, x: Tensor, out: Tensor) -> Tensor:
        torch.ops.toy.honest(x, *self.factors, out)
        return out

    @property
    def factors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.a, self.b, self.scales, self.rows


class KnowsItsName(Honest):
    def apply(self, x: Tensor, out: Tensor) -> Tensor:
        torch.ops.toy.named(x, *self.factors, out, self.name)
        return out


class KnowsTheActive(Honest):
    def apply(self, x: Tensor, out: Tensor) -> Tensor:
        torch.ops.toy.counted(x, *self.factors, out, self.active)
        return out


class KnowsTheSize(Honest):
    def apply(self, x: Tensor, out: Tensor) -> Tensor:
        torch.ops.toy.named(x, *self.factors, out, f"{int(x.shape[0])} rows")
        return out


class LeavesEarly(Honest):
    """Reads the device to find out whether there is anything to do (vllm #15090)."""

    def apply(self, x: Tensor, out: Tensor) -> Tensor:
        if (self.rows < 0).all():
            return out
        return super().apply(x, out)


class HidesItsWrites(Honest):
    def apply(self, x: Tensor, out: Tensor) -> Tensor:
        torch.ops.toy.liar(x, *self.factors, out)
        return out


class Misshapen(Honest):
    def apply(self, x: Tensor, out: Tensor) -> Tensor:
        out += torch.ops.toy.misshapen(x, *self.factors)
        return out


class ForgetsTheScaleWhenTraced(Honest):
    def apply(self, x: Tensor, out: Tensor) -> Tensor:
        scales = torch.ones_like(self.scales) if torch.compiler.is_compiling() else self.scales
        torch.ops.toy.honest(x, self.a, self.b, scales, self.rows, out)
        return out


class HasTheWeightsOfTheFirstWhenTraced(Honest):
    """Imitates a graph that holds the weights of a layer as constants."""

    first: ClassVar[tuple[Tensor, Tensor, Tensor] | None] = None

    def prepare(self, token_slots: Tensor) -> None:
        super().prepare(token_slots)
        kind = type(self)
        if kind.first is None:
            kind.first = self.a.clone(), self.b.clone(), self.scales.clone()

    def apply(self, x: Tensor, out: Tensor) -> Tensor:
        weights = self.first if torch.compiler.is_compiling() else (self.a, self.b, self.scales)
        assert weights is not None
        torch.ops.toy.honest(x, *weights, self.rows, out)
        return out


class _Subject(TorchSubject):
    def __init__(self, instance: type[Honest]) -> None:
        self.instance = instance

    def open(self, case: Case, machine: Machine, base: BaseLayer | None) -> Instance:
        return self.instance(case)


def _trial(instance: type[Honest], case: Case = CASE) -> Trial:
    subject = _Subject(instance)
    capabilities = subject.capabilities(CPU)
    assert isinstance(capabilities, Capabilities)
    capabilities = replace(capabilities, traceable=lambda case: True, skips_dead_ranks=False)
    return Trial(case, subject, capabilities, CPU, seed=5)


def _judge(instance: type[Honest]) -> Judgement:
    return Compile().judge(_trial(instance))


def test_layers_that_differ_only_in_their_tensors_share_one_graph() -> None:
    judgement = _judge(Honest)
    assert judgement.verdict is Verdict.PASS, judgement.message
    # the second one is for all other batch sizes
    assert judgement.metrics == {"operators": 1.0, "layers": 3.0, "graphs": 2.0}


def test_a_batch_without_smaller_ones_takes_a_single_graph() -> None:
    judgement = Compile().judge(_trial(Honest, replace(CASE, tokens=2)))
    assert judgement.verdict is Verdict.PASS, judgement.message
    assert judgement.metrics["graphs"] == 1.0


def test_where_nothing_is_compiled_nothing_is_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    judgement = _judge(Honest)
    assert judgement.verdict is Verdict.INCONCLUSIVE
    assert "torch.compile traced nothing (is TORCHDYNAMO_DISABLE set?)" in judgement.message


def test_a_graph_with_the_weights_of_another_layer_fails() -> None:
    HasTheWeightsOfTheFirstWhenTraced.first = None
    judgement = _judge(HasTheWeightsOfTheFirstWhenTraced)
    assert judgement.failure is Failure.WRONG_ANSWER, judgement
    assert "the same layer without torch.compile" in judgement.message


@pytest.mark.parametrize(
    ("instance", "failure", "words"),
    [
        (
            KnowsItsName,
            Failure.RECOMPILED,
            "layer 1 of 3 with a batch of ragged: another",
        ),
        (
            KnowsTheActive,
            Failure.RECOMPILED,
            "layer 0 of 3 with a batch of all_base: another",
        ),
        (KnowsTheSize, Failure.RECOMPILED, "a batch of 5 rows after one of 7: another graph"),
        (LeavesEarly, Failure.RECOMPILED, "cannot be traced as one graph"),
        (HidesItsWrites, Failure.WRONG_ANSWER, "opcheck of toy.liar.default"),
        (Misshapen, Failure.WRONG_ANSWER, "opcheck of toy.misshapen.default"),
        (ForgetsTheScaleWhenTraced, Failure.WRONG_ANSWER, "the same layer without torch.compile"),
    ],
)
def test_a_planted_defect_fails_with_its_kind(
    instance: type[Honest], failure: Failure, words: str
) -> None:
    judgement = _judge(instance)
    assert judgement.failure is failure
    assert words in judgement.message


class Source:
    name = "_lora_shrink_kernel"


def _compiles() -> None:
    """Imitates Triton where a kernel is compiled, if somebody listens."""
    from triton import knobs

    if knobs.compilation.listener is not None:
        knobs.compilation.listener(src=Source(), metadata={}, cache_hit=True)


class Specialises(Honest):
    """Imitates kernels that are specialised on the number of active adapters."""

    kinds: ClassVar[set[int]] = set()

    def prepare(self, token_slots: Tensor) -> None:
        super().prepare(token_slots)
        if self.active not in self.kinds:
            self.kinds.add(self.active)
            _compiles()


class LeavesAdaptersOut(Specialises):
    """Imitates kernels that have a variant for steps without adapters."""

    def prepare(self, token_slots: Tensor) -> None:
        super(Specialises, self).prepare(token_slots)
        if bool(self.active) not in self.kinds:
            self.kinds.add(bool(self.active))
            _compiles()


class KnowsTheLayer(Honest):
    """Imitates a kernel that each layer compiles for itself where it has no adapters."""

    def prepare(self, token_slots: Tensor) -> None:
        super().prepare(token_slots)
        if self.active == 0:
            _compiles()


@pytest.mark.parametrize(
    ("instance", "words"),
    [
        (Specialises, "layer 0 of 3 with a batch of single compiled _lora_shrink_kernel after"),
        (KnowsTheLayer, "layer 1 of 3 with a batch of all_base compiled _lora_shrink_kernel after"),
    ],
)
def test_a_kernel_that_is_compiled_after_warm_up_fails(instance: type[Honest], words: str) -> None:
    from triton import knobs

    Specialises.kinds.clear()
    judgement = _judge(instance)
    assert judgement.failure is Failure.RECOMPILED
    assert words in judgement.message
    assert knobs.compilation.listener is None


def test_a_first_step_without_adapters_may_compile_what_has_none() -> None:
    LeavesAdaptersOut.kinds = set()
    judgement = _judge(LeavesAdaptersOut)
    assert judgement.verdict is Verdict.PASS, judgement.message
    assert LeavesAdaptersOut.kinds == {True, False}


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        (replace(CASE, execution=Execution.GRAPH), "judged in eager execution only"),
        (replace(CASE, tokens=0), "the batch has no rows"),
    ],
)
def test_a_case_without_anything_to_trace_is_skipped_with_a_reason(case: Case, reason: str) -> None:
    assert reason in str(Compile().applies(_trial(Honest, case)))


@pytest.mark.parametrize("traceable", [None, lambda case: case.tokens > CASE.tokens])
def test_a_case_that_is_not_said_to_be_traceable_is_skipped_with_a_reason(
    traceable: Callable[[Case], bool] | None,
) -> None:
    trial = _trial(Honest)
    trial = replace(trial, capabilities=replace(trial.capabilities, traceable=traceable))
    assert "does not promise that torch.compile can trace it" in str(Compile().applies(trial))
