"""Race, schedule and overlap against small layers that are right, and against those that do not
overlap."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from loragate.core.machine import Machine, detect_machine
from loragate.core.verdict import Failure, Judgement, OracleName, Verdict
from loragate.execution.streams.model import modelled_streams
from loragate.matrix.case import Execution
from loragate.oracles import ORACLES
from loragate.protocol import Trial

from .stream_layers import (
    JoinsAtOnce,
    KeptByRecordStream,
    Layer,
    OverlapsInItsFirstStep,
    RoundsOnTwoStreams,
    Serialised,
    TwoForks,
    WaitsForTheSide,
    WithoutJoin,
)

RACE, SCHEDULE, OVERLAP = OracleName.RACE, OracleName.SCHEDULE, OracleName.OVERLAP
needs_gpu = pytest.mark.skipif(
    detect_machine().interpreted, reason="needs compiled kernels on a GPU"
)

MACHINES = [None, pytest.param(detect_machine(), marks=needs_gpu, id="gpu")]


@pytest.mark.parametrize("oracle", [RACE, SCHEDULE, OVERLAP])
@pytest.mark.parametrize("layer", [Layer, TwoForks, KeptByRecordStream])
@pytest.mark.parametrize("machine", MACHINES)
def test_a_right_layer_passes(
    layer: type[Layer],
    oracle: OracleName,
    machine: Machine | None,
    judge_streams: Callable[..., Judgement],
) -> None:
    for seed in range(3):
        judgement = judge_streams(layer, oracle, seed, machine)
        assert judgement.verdict is Verdict.PASS, judgement.message


def test_a_layer_of_a_case_of_graphs_is_judged_on_modelled_streams_as_well(
    judge_streams: Callable[..., Judgement],
) -> None:
    graph = {"execution": Execution.GRAPH}
    assert judge_streams(Layer, RACE, **graph).verdict is Verdict.PASS
    judgement = judge_streams(WithoutJoin, RACE, **graph)
    assert judgement.failure is Failure.RACE
    assert {name for name in ("host_access", "use_after_free") if judgement.metrics[name]} == set()


def test_the_measurements_say_whether_steps_were_replayed(
    judge_streams: Callable[..., Judgement],
) -> None:
    for layer, replays in ((Layer, 3), (WaitsForTheSide, 0)):
        judgement = judge_streams(layer, RACE)
        assert judgement.verdict is Verdict.PASS, judgement.message
        assert judgement.metrics["replays"] == replays


@pytest.mark.parametrize("layer", [Serialised, JoinsAtOnce])
@pytest.mark.parametrize("machine", MACHINES)
def test_streams_that_wait_for_each_other_do_not_overlap(
    layer: type[Layer], machine: Machine | None, judge_streams: Callable[..., Judgement]
) -> None:
    assert judge_streams(layer, RACE, machine=machine).verdict is Verdict.PASS
    judgement = judge_streams(layer, OVERLAP, machine=machine)
    assert judgement.failure is Failure.SERIALISED
    assert "side stream 1" in judgement.message


@pytest.mark.parametrize("machine", MACHINES)
def test_the_form_on_two_streams_gives_the_bits_of_that_on_one(
    machine: Machine | None, judge_streams: Callable[..., Judgement]
) -> None:
    assert judge_streams(RoundsOnTwoStreams, RACE, machine=machine).verdict is Verdict.PASS
    judgement = judge_streams(RoundsOnTwoStreams, SCHEDULE, machine=machine)
    assert judgement.failure is Failure.SCHEDULE_DEPENDENT
    assert "the sequential form" in judgement.message


def test_every_step_must_overlap(judge_streams: Callable[..., Judgement]) -> None:
    judgement = judge_streams(OverlapsInItsFirstStep, OVERLAP)
    assert judgement.failure is Failure.SERIALISED
    assert judgement.message.startswith("step 1: ")


@needs_gpu
@pytest.mark.parametrize("oracle", [RACE, SCHEDULE, OVERLAP])
def test_a_right_layer_passes_in_a_graph(
    oracle: OracleName, judge_streams: Callable[..., Judgement]
) -> None:
    judgement = judge_streams(Layer, oracle, machine=detect_machine(), execution=Execution.GRAPH)
    assert judgement.verdict is Verdict.PASS, judgement.message


def test_one_stream_is_no_case_for_these_oracles(make_trial: Callable[..., Trial]) -> None:
    for oracle in (RACE, SCHEDULE, OVERLAP):
        reason = ORACLES[oracle].applies(make_trial())
        assert reason == "the case runs on one stream"


def test_the_names_of_torch_cuda_mean_the_model_within_and_nothing_outside() -> None:
    before = torch.cuda.Stream
    with modelled_streams():
        side = torch.cuda.Stream()
        assert isinstance(side, torch.cuda.Stream)
        with torch.cuda.stream(side):
            assert torch.cuda.current_stream() is side
        assert torch.cuda.current_stream() is torch.cuda.default_stream()
        assert torch.cuda.Event().query()
        with torch.cuda.device(torch.cuda.current_device()):
            assert torch.cuda.current_stream() is torch.cuda.default_stream()
    assert torch.cuda.Stream is before
