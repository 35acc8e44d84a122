"""Every oracle meets the subject behind its boundary: a broken promise stops any of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from loragate.core.machine import Machine
from loragate.core.verdict import Failure, OracleName, Verdict
from loragate.matrix.case import Case, Execution, Streams
from loragate.matrix.engine_case import ENGINE_ORACLES
from loragate.oracles import ORACLES
from loragate.protocol import (
    BrokenProtocol,
    Capabilities,
    CheckedSubject,
    HotPath,
    Trial,
    raised_by_subject,
    unsupported,
)
from loragate.run.trial import run_trial
from loragate.subjects.torch.subject import DenseDelta, TorchSubject

# those that judge any subject in plain torch; the others need a promise or a GPU
JUDGES = [
    name
    for name in OracleName
    if name not in (OracleName.GUARD, OracleName.COMPILE, OracleName.WORK, OracleName.QUEUE)
    and name not in ENGINE_ORACLES
]

ORACLES_OF_STREAMS = (
    OracleName.RACE,
    OracleName.SCHEDULE,
    OracleName.OVERLAP,
    OracleName.INVENTORY,
)


class OneColumnShort(DenseDelta):
    def apply(self, x: Tensor, out: Tensor) -> Tensor:
        return super().apply(x, out)[:, 1:]


class Refuses(DenseDelta):
    def apply(self, x: Tensor, out: Tensor) -> Tensor:
        raise NotImplementedError("no kernel for this shape")


class Resizes(DenseDelta):
    def apply(self, x: Tensor, out: Tensor) -> Tensor:
        return super().apply(x, out).resize_(1, 1)


@pytest.mark.parametrize("oracle", JUDGES)
@pytest.mark.parametrize(
    ("instance", "failure"),
    [
        (OneColumnShort, Failure.BROKEN_PROTOCOL),
        (Resizes, Failure.BROKEN_PROTOCOL),
        (Refuses, Failure.EXCEPTION),
    ],
)
def test_no_oracle_computes_with_what_is_no_result(
    make_trial: Callable[..., Trial],
    oracle: OracleName,
    instance: type[DenseDelta],
    failure: Failure,
) -> None:
    streams = Streams.DUAL if oracle in ORACLES_OF_STREAMS else Streams.SEQUENTIAL
    # without a promise hot_path judges nothing
    promises = {"hot_path": frozenset(HotPath)}
    execution = Execution.GRAPH if oracle is OracleName.GRAPH else Execution.EAGER
    fields = {"oracles": (oracle,), "streams": streams, "execution": execution}
    trial = make_trial(instance, promises=promises, **fields)
    (judgement,) = run_trial(trial)
    assert (judgement.verdict, judgement.failure) == (Verdict.FAIL, failure)


@pytest.mark.parametrize("oracle", ORACLES)
def test_a_subject_that_keeps_the_protocol_gets_its_own_instances(
    make_trial: Callable[..., Trial], oracle: OracleName
) -> None:
    trial = make_trial()
    assert isinstance(trial.subject, CheckedSubject)
    instance = trial.subject.open(trial.case, trial.machine, None)
    assert type(instance.own) is DenseDelta
    # a copy of a trial is not wrapped twice
    assert replace(trial, seed=2).subject is trial.subject


def test_a_tensor_that_refuses_to_be_looked_at_is_charged_to_the_subject(
    make_trial: Callable[..., Trial],
) -> None:
    class Unaddressable(Tensor):
        def data_ptr(self) -> int:
            raise RuntimeError("there is no address")

    class Wraps(DenseDelta):
        def apply(self, x: Tensor, out: Tensor) -> Tensor:
            return super().apply(x, out).as_subclass(Unaddressable)

    trial = make_trial(Wraps)
    instance = trial.subject.open(trial.case, trial.machine, None)
    instance.prepare(torch.zeros(2, dtype=torch.int32))
    with pytest.raises(RuntimeError, match="no address") as caught:
        instance.apply(torch.zeros(2, 96), torch.zeros(2, 88))
    assert raised_by_subject(caught.value)


def test_a_reason_that_is_no_text_breaks_the_protocol(make_trial: Callable[..., Trial]) -> None:
    trial = make_trial()
    have = replace(trial.capabilities, refuses=lambda case: False)
    with pytest.raises(BrokenProtocol, match="returned an object of type bool; expected a str"):
        unsupported(trial.case, have)


def test_capabilities_of_another_type_break_the_protocol(cpu: Machine) -> None:
    class Answers(TorchSubject):
        def capabilities(self, machine: Machine) -> Capabilities | str:
            return ["bf16"]  # type: ignore[return-value]

    with pytest.raises(BrokenProtocol, match="an object of type list; expected a Capabilities"):
        CheckedSubject(Answers()).capabilities(cpu)


@pytest.mark.parametrize(
    ("target", "given"),
    [("mine", "'mine'"), (":start", "':start'"), ("mine:", "'mine:'"), (None, "None")],
)
def test_a_target_that_names_no_function_is_shown_with_the_form_that_it_must_have(
    make_trial: Callable[..., Trial], target: str | None, given: str
) -> None:
    class Serves(TorchSubject):
        def engine_target(self, case: Case) -> str:
            return target  # type: ignore[return-value]

    message = f'engine_target(case) returned {given}; expected "module:function"'
    with pytest.raises(BrokenProtocol) as caught:
        CheckedSubject(Serves()).engine_target(make_trial().case)
    assert str(caught.value) == message
