"""Race, schedule and overlap against small layers on two modelled streams, right and wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from loragate.core.machine import Machine, detect_machine
from loragate.core.verdict import Failure, Judgement, OracleName, Verdict
from loragate.execution.streams.model import modelled_streams
from loragate.matrix.case import Case, Execution, Mix, Site, Streams
from loragate.oracles import ORACLES
from loragate.oracles.concurrency import overlap, schedule
from loragate.protocol import BaseLayer, Capabilities, Instance, Pool, Trial
from loragate.subjects.torch.subject import TorchSubject

RACE, SCHEDULE, OVERLAP = OracleName.RACE, OracleName.SCHEDULE, OracleName.OVERLAP


class Layer:
    """The base product on the main stream, the delta of all rows on a side stream."""

    def __init__(self, case: Case, base: BaseLayer) -> None:
        self.case, self.base = case, base
        self.side = torch.cuda.Stream() if case.streams is Streams.DUAL else None
        self.start, self.end = (
            (torch.cuda.Event(), torch.cuda.Event()) if self.side else (None,) * 2
        )
        rank, device = case.rank * len(case.slices), base.weight.device
        self.a = torch.zeros(case.slots + 1, rank, case.in_features, device=device)
        self.b = torch.zeros(case.slots + 1, case.out_features, rank, device=device)
        self.shrunk = torch.zeros(case.tokens, rank, device=device)
        self.delta = torch.zeros(case.tokens, case.out_features, device=device)
        self.rows = torch.zeros(case.tokens, dtype=torch.long, device=device)

    def load(self, slot: int, pool: Pool) -> None:
        column = 0
        for part, (b, rank, scale) in enumerate(
            zip(pool.b, pool.ranks[slot], pool.scales[slot], strict=True)
        ):
            ranks = slice(part * self.case.rank, part * self.case.rank + rank)
            self.a[slot, ranks] = pool.a[slot, part, :rank].float()
            self.b[slot, column : column + b.shape[1], ranks] = scale * b[slot, :, :rank].float()
            column += b.shape[1]

    def unload(self, slot: int) -> None:
        self.a[slot] = 0

    def prepare(self, token_slots: Tensor) -> None:
        # base rows have a slot of zeros
        self.rows.copy_(torch.where(token_slots < 0, self.case.slots, token_slots))

    def apply(self, x: Tensor, out: Tensor) -> Tensor:
        if self.side is not None:
            return self.dual(x)
        self.work(x)
        return self.joined(functional.linear(x, self.base.weight, self.base.bias))

    def dual(self, x: Tensor) -> Tensor:
        self.start.record()
        with torch.cuda.stream(self.side):
            self.side.wait_event(self.start)
            self.work(x)
            self.end.record()
        y = functional.linear(x, self.base.weight, self.base.bias)
        torch.cuda.current_stream().wait_event(self.end)
        return self.joined(y)

    def work(self, x: Tensor) -> None:
        torch.bmm(self.a[self.rows], x.float()[:, :, None], out=self.shrunk[:, :, None])
        torch.bmm(self.b[self.rows], self.shrunk[:, :, None], out=self.delta[:, :, None])

    def joined(self, y: Tensor) -> Tensor:
        return (y.float() + self.delta).to(y.dtype)


class WithoutFork(Layer):
    """The side does not wait for the input, which the main stream has just written."""

    def dual(self, x: Tensor) -> Tensor:
        with torch.cuda.stream(self.side):
            self.work(x)
            self.end.record()
        y = functional.linear(x, self.base.weight, self.base.bias)
        torch.cuda.current_stream().wait_event(self.end)
        return self.joined(y)


class WaitsInItsPreparation(WithoutFork):
    """What was queued before a step is prepared is done when the host goes on."""

    def prepare(self, token_slots: Tensor) -> None:
        super().prepare(token_slots)
        if self.side is not None:
            torch.cuda.synchronize()


class WaitsForTheSide(Layer):
    """No capture takes this."""

    def joined(self, y: Tensor) -> Tensor:
        torch.cuda.synchronize()
        return super().joined(y)


class WithoutJoin(Layer):
    def dual(self, x: Tensor) -> Tensor:
        self.start.record()
        with torch.cuda.stream(self.side):
            self.side.wait_event(self.start)
            self.work(x)
        return self.joined(functional.linear(x, self.base.weight, self.base.bias))


class RecordedOutside(Layer):
    """The end is recorded behind the scope of the side stream: on the main one."""

    def dual(self, x: Tensor) -> Tensor:
        self.start.record()
        with torch.cuda.stream(self.side):
            self.side.wait_event(self.start)
            self.work(x)
        self.end.record()
        y = functional.linear(x, self.base.weight, self.base.bias)
        torch.cuda.current_stream().wait_event(self.end)
        return self.joined(y)


class WaitsBeforeRecord(Layer):
    """In the first step the main stream waits for what nothing has recorded."""

    def dual(self, x: Tensor) -> Tensor:
        self.start.record()
        torch.cuda.current_stream().wait_event(self.end)
        with torch.cuda.stream(self.side):
            self.side.wait_event(self.start)
            self.work(x)
            self.end.record()
        return self.joined(functional.linear(x, self.base.weight, self.base.bias))


class TwoForks(Layer):
    """Two halves of the batch on two side streams."""

    def __init__(self, case: Case, base: BaseLayer) -> None:
        super().__init__(case, base)
        self.other = torch.cuda.Stream() if self.side else None
        self.other_end = torch.cuda.Event() if self.side else None

    def dual(self, x: Tensor) -> Tensor:
        half = len(x) // 2
        self.start.record()
        sides = ((self.side, self.end), (self.other, self.second_end()))
        for (stream, end), rows in zip(sides, (slice(half), slice(half, None)), strict=True):
            with torch.cuda.stream(stream):
                stream.wait_event(self.start)
                a, b = self.a[self.rows[rows]], self.b[self.rows[rows]]
                self.delta[rows] = (b @ (a @ x[rows].float()[:, :, None]))[:, :, 0]
                end.record()
        y = functional.linear(x, self.base.weight, self.base.bias)
        for _, end in sides:
            torch.cuda.current_stream().wait_event(end)
        return self.joined(y)

    def second_end(self) -> Any:
        return self.other_end


class OneEventForTwoForks(TwoForks):
    def second_end(self) -> Any:
        return self.end


class FreedOnMain(Layer):
    """An input of the side goes back to the main stream while the side reads it."""

    def dual(self, x: Tensor) -> Tensor:
        wide = x.float()
        self.start.record()
        with torch.cuda.stream(self.side):
            self.side.wait_event(self.start)
            self.work(wide)
            self.end.record()
        self.let_go(wide)
        del wide
        y = functional.linear(x, self.base.weight, self.base.bias)
        torch.cuda.current_stream().wait_event(self.end)
        return self.joined(y)

    def let_go(self, wide: Tensor) -> None:
        pass


class KeptByRecordStream(FreedOnMain):
    def let_go(self, wide: Tensor) -> None:
        wide.record_stream(self.side)


class OverwritesTheInput(Layer):
    """The main stream changes x while the side may still read it."""

    def dual(self, x: Tensor) -> Tensor:
        self.start.record()
        with torch.cuda.stream(self.side):
            self.side.wait_event(self.start)
            self.work(x)
            self.end.record()
        y = functional.linear(x, self.base.weight, self.base.bias)
        x.zero_()
        torch.cuda.current_stream().wait_event(self.end)
        return self.joined(y)


class NextStepTooEarly(Layer):
    """The join waits for the shrink only: the expand may run into the next step."""

    def dual(self, x: Tensor) -> Tensor:
        self.start.record()
        with torch.cuda.stream(self.side):
            self.side.wait_event(self.start)
            torch.bmm(self.a[self.rows], x.float()[:, :, None], out=self.shrunk[:, :, None])
            self.end.record()
            torch.bmm(self.b[self.rows], self.shrunk[:, :, None], out=self.delta[:, :, None])
        y = functional.linear(x, self.base.weight, self.base.bias)
        torch.cuda.current_stream().wait_event(self.end)
        return self.joined(y)


class PreparesBeside(Layer):
    """The mapping is written on a stream of its own, behind the last step that ran eagerly."""

    def __init__(self, case: Case, base: BaseLayer) -> None:
        super().__init__(case, base)
        self.copies = torch.cuda.Stream() if self.side else None
        self.done = torch.cuda.Event() if self.side else None

    def prepare(self, token_slots: Tensor) -> None:
        if self.copies is None:
            super().prepare(token_slots)
            return
        self.wait()
        with torch.cuda.stream(self.copies):
            super().prepare(token_slots)
        torch.cuda.current_stream().wait_stream(self.copies)

    def wait(self) -> None:
        self.copies.wait_event(self.done)

    def dual(self, x: Tensor) -> Tensor:
        y = super().dual(x)
        # an event that is recorded within a capture says nothing about its replays
        if not torch.cuda.is_current_stream_capturing():
            self.done.record()
        return y


class PreparesBehind(PreparesBeside):
    def wait(self) -> None:
        self.copies.wait_stream(torch.cuda.current_stream())


class Serialised(Layer):
    """The side waits for the base product."""

    def dual(self, x: Tensor) -> Tensor:
        y = functional.linear(x, self.base.weight, self.base.bias)
        self.side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.side):
            self.work(x)
        torch.cuda.current_stream().wait_stream(self.side)
        return self.joined(y)


class JoinsAtOnce(Layer):
    """The base product waits for the side."""

    def dual(self, x: Tensor) -> Tensor:
        self.side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.side):
            self.work(x)
        torch.cuda.current_stream().wait_stream(self.side)
        return self.joined(functional.linear(x, self.base.weight, self.base.bias))


class UninitialisedDelta(Layer):
    """Rows without an adapter are left out of a delta that nothing has set to zero."""

    def work(self, x: Tensor) -> None:
        self.delta = torch.empty_like(self.delta)
        for row, slot in enumerate(self.rows.tolist()):
            if slot < self.case.slots:
                self.delta[row] = self.b[slot] @ (self.a[slot] @ x[row].float())


class Subject(TorchSubject):
    def __init__(self, layer: type[Layer]) -> None:
        self.layer = layer

    def capabilities(self, machine: Machine) -> Capabilities:
        have = super().capabilities(machine)
        assert not isinstance(have, str)
        supports = {"streams": frozenset(Streams), "execution": frozenset(Execution)}
        return replace(have, supports={**have.supports, **supports})

    def open(self, case: Case, machine: Machine, base: BaseLayer | None) -> Instance:
        assert base is not None
        return self.layer(case, base)


needs_gpu = pytest.mark.skipif(
    detect_machine().interpreted, reason="needs compiled kernels on a GPU"
)
MACHINES = [None, pytest.param(detect_machine(), marks=needs_gpu, id="gpu")]


@pytest.fixture
def judge(make_trial: Callable[..., Trial]) -> Callable[..., Judgement]:
    def judge(
        layer: type[Layer],
        oracle: OracleName,
        seed: int = 1,
        machine: Machine | None = None,
        **fields: Any,
    ) -> Judgement:
        fields = {"site": Site.LORA_LINEAR, "streams": Streams.DUAL, "mix": Mix.SHUFFLED, **fields}
        trial = make_trial(seed=seed, **fields)
        machine, subject = machine or trial.machine, Subject(layer)
        have = subject.capabilities(machine)
        trial = replace(trial, machine=machine, subject=subject, capabilities=have)
        assert ORACLES[oracle].applies(trial) is None
        return ORACLES[oracle].judge(trial)

    return judge


@pytest.mark.parametrize("oracle", [RACE, SCHEDULE, OVERLAP])
@pytest.mark.parametrize("layer", [Layer, TwoForks, KeptByRecordStream])
@pytest.mark.parametrize("machine", MACHINES)
def test_a_right_layer_passes(
    layer: type[Layer],
    oracle: OracleName,
    machine: Machine | None,
    judge: Callable[..., Judgement],
) -> None:
    for seed in range(3):
        judgement = judge(layer, oracle, seed, machine)
        assert judgement.verdict is Verdict.PASS, judgement.message


def test_a_layer_of_a_case_of_graphs_is_judged_on_modelled_streams_as_well(
    judge: Callable[..., Judgement],
) -> None:
    graph = {"execution": Execution.GRAPH}
    assert judge(Layer, RACE, **graph).verdict is Verdict.PASS
    judgement = judge(WithoutJoin, RACE, **graph)
    assert judgement.failure is Failure.RACE
    assert {name for name in ("host_access", "use_after_free") if judgement.metrics[name]} == set()


RACES = [
    (WithoutFork, "read after write"),
    (WaitsInItsPreparation, "read after write"),
    (WithoutJoin, "read after write"),
    (RecordedOutside, "read after write"),
    (WaitsBeforeRecord, "read after write"),
    (OneEventForTwoForks, "read after write"),
    (FreedOnMain, "use after free"),
    (OverwritesTheInput, "write after read"),
    (NextStepTooEarly, "read after write"),
]


@pytest.mark.parametrize(("layer", "hazard"), RACES)
@pytest.mark.parametrize("machine", MACHINES)
def test_a_race_is_found_in_one_run_with_both_places(
    layer: type[Layer],
    hazard: str,
    machine: Machine | None,
    judge: Callable[..., Judgement],
) -> None:
    judgement = judge(layer, RACE, machine=machine)
    assert judgement.failure is Failure.RACE
    assert hazard in judgement.message
    assert "on main" in judgement.message or "memory of main" in judgement.message
    assert "on side stream 1" in judgement.message
    assert judgement.message.count("test_streams.py") >= 2
    # a listed finding limits each kind
    assert judgement.metrics[hazard.replace(" ", "_")] > 0


@pytest.mark.parametrize("layer", [layer for layer, _ in RACES if layer is not FreedOnMain])
def test_a_race_gives_other_bits_in_another_legal_order(
    layer: type[Layer], judge: Callable[..., Judgement]
) -> None:
    judgement = judge(layer, SCHEDULE)
    assert judgement.failure is Failure.SCHEDULE_DEPENDENT
    assert "the order of the host, with #" in judgement.message


@pytest.mark.parametrize("machine", MACHINES)
def test_a_race_between_replays_is_found_where_eager_steps_have_none(
    machine: Machine | None, judge: Callable[..., Judgement]
) -> None:
    execution = Execution.GRAPH if machine else Execution.EAGER
    assert judge(PreparesBehind, RACE, machine=machine, execution=execution).failure is None
    judgement = judge(PreparesBeside, RACE, machine=machine, execution=execution)
    assert judgement.failure is Failure.RACE
    assert "of replay 1" in judgement.message
    if machine:
        judgement = judge(PreparesBeside, RACE, machine=machine)
        assert judgement.verdict is Verdict.PASS, judgement.message


def test_the_measurements_say_whether_steps_were_replayed(
    judge: Callable[..., Judgement],
) -> None:
    for layer, replays in ((Layer, 3), (WaitsForTheSide, 0)):
        judgement = judge(layer, RACE)
        assert judgement.verdict is Verdict.PASS, judgement.message
        assert judgement.metrics["replays"] == replays


@pytest.mark.parametrize("layer", [Serialised, JoinsAtOnce])
@pytest.mark.parametrize("machine", MACHINES)
def test_streams_that_wait_for_each_other_do_not_overlap(
    layer: type[Layer], machine: Machine | None, judge: Callable[..., Judgement]
) -> None:
    assert judge(layer, RACE, machine=machine).verdict is Verdict.PASS
    judgement = judge(layer, OVERLAP, machine=machine)
    assert judgement.failure is Failure.SERIALISED
    assert "side stream 1" in judgement.message


@needs_gpu
@pytest.mark.parametrize("oracle", [RACE, SCHEDULE, OVERLAP])
def test_a_right_layer_passes_in_a_graph(
    oracle: OracleName, judge: Callable[..., Judgement]
) -> None:
    judgement = judge(Layer, oracle, machine=detect_machine(), execution=Execution.GRAPH)
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
    layer: type[Layer], execution: Execution, judge: Callable[..., Judgement]
) -> None:
    judgement = judge(layer, SCHEDULE, machine=detect_machine(), execution=execution)
    assert judgement.failure is Failure.SCHEDULE_DEPENDENT


@pytest.mark.parametrize(
    ("later", "verdict", "delays"),
    [(3, Verdict.PASS, 3.0), (2, Verdict.PASS, 2.0), (0, None, None)],
)
def test_only_delays_that_happened_count(
    later: int,
    verdict: Verdict | None,
    delays: float | None,
    make_trial: Callable[..., Trial],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from loragate.execution.streams import delays as module

    @contextmanager
    def delayed(chosen: int | None = None) -> Iterator[module.Places]:
        places = module.Places(None)
        places.passed = 3 if chosen is None else later
        yield places

    monkeypatch.setattr(module, "delayed", delayed)
    monkeypatch.setattr(schedule, "queued_steps", lambda trial, before_input: [])
    monkeypatch.setattr(schedule, "sequential_results", lambda trial: None)
    monkeypatch.setattr(schedule.Schedule, "_compare", lambda *results: None)
    judgement = schedule.Schedule()._judge_delays(make_trial())
    assert judgement.verdict is (verdict or Verdict.INCONCLUSIVE)
    assert judgement.metrics.get("delays") == delays


@pytest.mark.parametrize(("calls", "verdict"), [(7, Verdict.FAIL), (6, Verdict.INCONCLUSIVE)])
def test_a_handshake_that_other_calls_have_misplaced_shows_nothing(
    calls: int,
    verdict: Verdict,
    make_trial: Callable[..., Trial],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from loragate.execution.streams import handshake

    def steps(number_of_calls: int) -> Any:
        return SimpleNamespace(
            recorder=SimpleNamespace(number_of_calls=number_of_calls, calls={3: 1, 5: 2})
        )

    meeting = SimpleNamespace(counts=lambda: (0, 2))
    monkeypatch.setattr(handshake, "Meeting", lambda device: meeting)
    monkeypatch.setattr(overlap, "traced_steps", lambda trial, before_call: steps(calls))
    judgement = overlap.Overlap()._shake_hands(make_trial(), steps(7), [[(3, 5)]])
    assert judgement.verdict is verdict


@needs_gpu
def test_streams_that_one_queue_holds_back_miss_each_other() -> None:
    from loragate.execution.streams.handshake import Meeting

    meeting = Meeting("cuda")
    for party in range(2):
        meeting.arrive(party)
    assert meeting.counts() == (1, 1)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    meeting.arrive(0)
    with torch.cuda.stream(side):
        meeting.arrive(1)
    torch.cuda.synchronize()
    assert meeting.counts() == (3, 1)


def test_an_uninitialised_delta_differs_from_the_sequential_form_or_from_itself(
    judge: Callable[..., Judgement],
) -> None:
    assert judge(UninitialisedDelta, SCHEDULE).failure is Failure.SCHEDULE_DEPENDENT


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
    assert torch.cuda.Stream is before
