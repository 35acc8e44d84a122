"""What the delays and the handshakes of two streams show, and when they show nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from loragate.core.machine import detect_machine
from loragate.core.verdict import Verdict
from loragate.execution.graph import capture
from loragate.execution.streams.model import current_number, modelled_streams
from loragate.execution.streams.recorder import Recorder
from loragate.oracles.concurrency import overlap, schedule
from loragate.protocol import Trial

needs_gpu = pytest.mark.skipif(
    detect_machine().interpreted, reason="needs compiled kernels on a GPU"
)


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


def test_a_warm_up_before_a_capture_has_no_places() -> None:
    from loragate.execution.streams.delays import delayed

    def step() -> None:
        torch.cuda.Event().record()

    def places(run: Callable[[], object]) -> int:
        with modelled_streams(Recorder("cpu", current_number)), delayed() as found:
            run()
        return found.passed

    assert places(step) == 1
    assert places(lambda: capture(step, warm_ups=3)) == places(lambda: capture(step, warm_ups=0))
    assert places(lambda: (capture(step, warm_ups=3), step())) > places(lambda: capture(step))


def test_a_delay_is_ahead_of_an_event_that_is_recorded_and_behind_one_that_is_awaited(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from loragate.execution.streams.delays import delayed

    calls: list[str] = []

    class Event:
        def record(self, stream: Any = None) -> None:
            calls.append("record")

        def wait(self, stream: Any = None) -> None:
            calls.append("wait")

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: calls.append("delay"))
    with delayed(0):
        Event().record()
    with delayed(0):
        Event().wait()
    assert calls == ["delay", "record", "wait", "delay"]


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
