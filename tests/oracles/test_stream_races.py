"""Layers of two streams with a race, on modelled streams and on those of a GPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from loragate.core.machine import Machine, detect_machine
from loragate.core.verdict import Failure, Judgement, OracleName, Verdict
from loragate.matrix.case import Execution

from .compiled_layers import CopiesBehindTheEnd, CopiesTheDelta
from .stream_layers import (
    FreedOnMain,
    JoinsTwoSteps,
    Layer,
    LoadsBeside,
    LoadsBesideTheStepBefore,
    NextStepTooEarly,
    OneEventForTwoForks,
    OverwritesTheInput,
    PreparesBehind,
    PreparesBeside,
    ReadsItsFlagInPlaceOfTheJoin,
    RecordedOutside,
    UninitialisedDelta,
    WaitsBeforeRecord,
    WaitsInItsPreparation,
    WithoutFork,
    WithoutJoin,
)

RACE, SCHEDULE = OracleName.RACE, OracleName.SCHEDULE
needs_gpu = pytest.mark.skipif(
    detect_machine().interpreted, reason="needs compiled kernels on a GPU"
)

MACHINES = [None, pytest.param(detect_machine(), marks=needs_gpu, id="gpu")]


RACES = [
    (WithoutFork, "read after write"),
    (WaitsInItsPreparation, "read after write"),
    (WithoutJoin, "read after write"),
    (ReadsItsFlagInPlaceOfTheJoin, "read after write"),
    (RecordedOutside, "read after write"),
    (WaitsBeforeRecord, "read after write"),
    (OneEventForTwoForks, "read after write"),
    (FreedOnMain, "use after free"),
    (OverwritesTheInput, "write after read"),
    (NextStepTooEarly, "read after write"),
    (JoinsTwoSteps, "read after write"),
]
# of which two steps in other orders show something
IN_TWO_STEPS = [layer for layer, _ in RACES if layer not in (FreedOnMain, JoinsTwoSteps)]


@pytest.mark.parametrize(("layer", "hazard"), RACES)
@pytest.mark.parametrize("machine", MACHINES)
def test_a_race_is_found_in_one_run_with_both_places(
    layer: type[Layer],
    hazard: str,
    machine: Machine | None,
    judge_streams: Callable[..., Judgement],
) -> None:
    judgement = judge_streams(layer, RACE, machine=machine)
    assert judgement.failure is Failure.RACE
    assert hazard in judgement.message
    assert "on main" in judgement.message or "memory of main" in judgement.message
    assert "on side stream 1" in judgement.message
    assert judgement.message.count("stream_layers.py") >= 2
    # a listed finding limits each kind
    assert judgement.metrics[hazard.replace(" ", "_")] > 0


@pytest.mark.parametrize(
    ("layer", "hazards"),
    [
        (LoadsBeside, {"read_after_write", "write_after_read"}),
        (LoadsBesideTheStepBefore, {"write_after_read"}),
    ],
)
@pytest.mark.parametrize("machine", MACHINES)
def test_a_load_without_an_order_to_the_steps_beside_it_is_a_race(
    layer: type[Layer],
    hazards: set[str],
    machine: Machine | None,
    judge_streams: Callable[..., Judgement],
) -> None:
    judgement = judge_streams(layer, RACE, machine=machine)
    assert judgement.failure is Failure.RACE
    assert "in load" in judgement.message
    kinds = ("read_after_write", "write_after_read", "use_after_free")
    assert {kind for kind in kinds if judgement.metrics[kind] > 0} == hazards


@needs_gpu
def test_a_race_of_a_kernel_that_is_launched_in_its_compiled_form_is_found(
    judge_streams: Callable[..., Judgement],
) -> None:
    judgement = judge_streams(CopiesBehindTheEnd, RACE, machine=detect_machine())
    assert judgement.failure is Failure.RACE
    assert "copy_kernel" in judgement.message
    assert judgement.metrics["read_after_write"] > 0


@needs_gpu
@pytest.mark.parametrize("execution", [Execution.EAGER, Execution.GRAPH])
def test_a_kernel_in_its_compiled_form_behind_what_it_needs_is_no_race(
    execution: Execution, judge_streams: Callable[..., Judgement]
) -> None:
    judgement = judge_streams(CopiesTheDelta, RACE, machine=detect_machine(), execution=execution)
    assert judgement.verdict is Verdict.PASS, judgement.message


@pytest.mark.parametrize("layer", IN_TWO_STEPS)
def test_a_race_gives_other_bits_in_another_legal_order(
    layer: type[Layer], judge_streams: Callable[..., Judgement]
) -> None:
    judgement = judge_streams(layer, SCHEDULE)
    assert judgement.failure is Failure.SCHEDULE_DEPENDENT
    assert "the order of the host, with #" in judgement.message


@pytest.mark.parametrize("machine", MACHINES)
def test_a_race_between_replays_is_found_where_eager_steps_have_none(
    machine: Machine | None, judge_streams: Callable[..., Judgement]
) -> None:
    execution = Execution.GRAPH if machine else Execution.EAGER
    assert judge_streams(PreparesBehind, RACE, machine=machine, execution=execution).failure is None
    judgement = judge_streams(PreparesBeside, RACE, machine=machine, execution=execution)
    assert judgement.failure is Failure.RACE
    assert "of replay 1" in judgement.message
    if machine:
        judgement = judge_streams(PreparesBeside, RACE, machine=machine)
        assert judgement.verdict is Verdict.PASS, judgement.message


@needs_gpu
@pytest.mark.parametrize(
    ("layer", "execution"),
    [
        (WithoutJoin, Execution.EAGER),
        (WithoutFork, Execution.EAGER),
        (NextStepTooEarly, Execution.EAGER),
        # a capture refuses work that nothing joins
        (OverwritesTheInput, Execution.GRAPH),
    ],
)
def test_a_delay_shows_a_race_on_real_streams(
    layer: type[Layer], execution: Execution, judge_streams: Callable[..., Judgement]
) -> None:
    judgement = judge_streams(layer, SCHEDULE, machine=detect_machine(), execution=execution)
    assert judgement.failure is Failure.SCHEDULE_DEPENDENT


def test_an_uninitialised_delta_differs_from_the_sequential_form_or_from_itself(
    judge_streams: Callable[..., Judgement],
) -> None:
    # as outside of tests, where memory has no NaN to be seen by another oracle
    torch.use_deterministic_algorithms(False)
    assert judge_streams(UninitialisedDelta, SCHEDULE).failure is Failure.SCHEDULE_DEPENDENT
