"""Which stream waits for what when work is forked and joined."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch

from lorakernels.runtime import streams
from lorakernels.runtime.streams import (
    branch,
    claim,
    fork_join,
    is_capturing,
    stream_module,
)

CPU = torch.device("cpu")


def nothing() -> None:
    pass


def test_only_a_gpu_has_streams() -> None:
    assert stream_module(torch.device("cuda")) is torch.cuda
    for without in ("cpu", "meta", "xpu"):
        assert stream_module(torch.device(without)) is None


def test_sides_have_the_priority_that_torch_calls_high(recorded_streams: Any) -> None:
    fork_join(CPU, nothing, nothing, nothing)
    assert recorded_streams.priorities == [-1, -1]


def test_a_side_starts_behind_the_fork_and_is_waited_for_behind_main(recorded_streams: Any) -> None:
    def main() -> str:
        recorded_streams.note("main")
        return "result"

    result = fork_join(CPU, main, lambda: recorded_streams.note("side"))
    assert result == "result"
    assert recorded_streams.log == [
        "main records event0",
        "side1 waits event0",
        "side1 runs side",
        "side1 records event1",
        "main runs main",
        "main waits event1",
    ]


def test_every_side_has_a_stream_and_is_waited_for(recorded_streams: Any) -> None:
    notes = [lambda name=name: recorded_streams.note(name) for name in "abc"]
    fork_join(CPU, nothing, *notes)
    log = recorded_streams.log
    assert [line for line in log if "runs" in line] == [
        "side1 runs a",
        "side2 runs b",
        "side3 runs c",
    ]
    assert log[-3:] == ["main waits event1", "main waits event2", "main waits event3"]
    for number, event in ((1, 1), (2, 2), (3, 3)):
        assert f"side{number} waits event0" in log
        assert f"side{number} records event{event}" in log


def test_a_second_fork_has_the_streams_of_the_first_and_events_of_its_own(
    recorded_streams: Any,
) -> None:
    for _ in range(2):
        fork_join(CPU, nothing, nothing)
    records = [line for line in recorded_streams.log if "records" in line]
    assert records == [
        "main records event0",
        "side1 records event1",
        "main records event2",
        "side1 records event3",
    ]


def test_branches_in_flight_at_the_same_time_have_different_streams_and_numbers(
    recorded_streams: Any,
) -> None:
    found: dict[str, tuple[str, int]] = {}

    def noting(name: str, *, nested: bool = False) -> Callable[[], None]:
        def work() -> None:
            found[name] = (recorded_streams.current.name, branch())
            if nested:
                fork_join(CPU, noting(f"main in {name}"), noting(f"side in {name}"))
            assert found[name] == (recorded_streams.current.name, branch())

        return work

    fork_join(CPU, noting("main", nested=True), noting("a", nested=True), noting("b"))
    assert found["main"] == found["main in main"] == ("main", 0)
    assert found["a"] == found["main in a"]
    sides = [found[name] for name in ("a", "b", "side in a", "side in main")]
    for of_sides in zip(*sides, strict=True):
        assert len(set(of_sides)) == 4
    assert branch() == 0


def test_a_nested_side_is_ordered_by_the_branch_that_forks_it(recorded_streams: Any) -> None:
    def nested() -> None:
        fork_join(CPU, nothing, lambda: recorded_streams.note("inner"))

    fork_join(CPU, nothing, nested)
    assert recorded_streams.log == [
        "main records event0",
        "side1 waits event0",
        "side1 records event2",
        "side2 waits event2",
        "side2 runs inner",
        "side2 records event3",
        "side1 waits event3",
        "side1 records event1",
        "main waits event1",
    ]


def test_forks_of_different_streams_share_no_side(recorded_streams: Any) -> None:
    other = recorded_streams.Stream(CPU, 0)
    fork_join(CPU, nothing, lambda: recorded_streams.note("a"))
    with recorded_streams.stream(other):
        fork_join(CPU, nothing, lambda: recorded_streams.note("b"))
    a, b = (line for line in recorded_streams.log if "runs" in line)
    assert a.split()[0] != b.split()[0]
    assert recorded_streams.log[-1].startswith(f"{other.name} waits")


def test_a_stream_that_is_handed_out_twice_is_not_used_twice(recorded_streams: Any) -> None:
    one = recorded_streams.Stream(CPU, 0)
    recorded_streams.drawn = [recorded_streams.main, one, one, recorded_streams.main]
    notes = [lambda name=name: recorded_streams.note(name) for name in "ab"]
    fork_join(CPU, nothing, *notes)
    assert {line for line in recorded_streams.log if "runs" in line} == {
        "side1 runs a",
        "side2 runs b",
    }


def test_more_branches_than_torch_has_streams_share_them(recorded_streams: Any) -> None:
    pool = [recorded_streams.Stream(CPU, 0) for _ in range(32)]
    # in turn, as torch hands them out; further ones would be new
    recorded_streams.drawn = pool * 40
    numbers: list[int] = []

    def main() -> None:
        for _ in range(40):
            fork_join(CPU, nothing, work)

    def work() -> None:
        numbers.append(branch())
        recorded_streams.note("work")

    fork_join(CPU, main, work)
    assert numbers == list(range(1, 42))
    runs = [line.split()[0] for line in recorded_streams.log if "runs" in line]
    assert len(set(runs[:32])) == 32
    assert set(runs) == {stream.name for stream in pool}


@pytest.mark.parametrize("where", ["main", "first side", "second side"])
def test_what_was_forked_is_waited_for_where_a_part_raises(
    recorded_streams: Any, where: str
) -> None:
    def failing(name: str) -> Callable[[], None]:
        def work() -> None:
            recorded_streams.note(name)
            if name == where:
                raise RuntimeError(name)

        return work

    with pytest.raises(RuntimeError, match=where):
        fork_join(CPU, failing("main"), failing("first side"), failing("second side"))
    log = recorded_streams.log
    ended = {line.split()[2] for line in log if line.startswith("side") and "records" in line}
    used = {line.split()[0] for line in log if line.startswith("side")}
    assert len(ended) == len(used) == {"main": 2, "first side": 1, "second side": 2}[where]
    assert {line.split()[2] for line in log if line.startswith("main waits")} == ended
    assert (recorded_streams.current.name, branch()) == ("main", 0)


def test_without_streams_the_parts_run_in_the_same_order_and_nothing_else_happens(
    recorded_streams: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def calls(**options: bool) -> tuple[str, list[str]]:
        order: list[str] = []

        def main() -> str:
            order.append("main")
            return "result"

        sides = [lambda: order.append("a"), lambda: order.append("b")]
        return fork_join(CPU, main, *sides, **options), order

    wanted = calls()
    recorded_streams.log.clear()
    assert calls(parallel=False) == wanted
    assert recorded_streams.log == []
    monkeypatch.undo()
    assert calls() == wanted


def test_a_side_that_runs_on_the_current_stream_stays_in_its_branch() -> None:
    found: list[int] = []
    fork_join(CPU, lambda: found.append(branch()), lambda: found.append(branch()))
    assert found == [0, 0]


def test_nothing_is_forked_without_a_side(recorded_streams: Any) -> None:
    assert fork_join(CPU, lambda: 3) == 3
    assert recorded_streams.log == []


def test_a_device_without_streams_captures_nothing() -> None:
    assert not is_capturing(CPU)


def test_the_current_stream_says_whether_it_captures(recorded_streams: Any) -> None:
    assert not is_capturing(CPU)
    recorded_streams.capturing = True
    assert is_capturing(CPU)
    assert not recorded_streams.log


def test_it_is_the_current_stream_of_the_device_that_is_asked_about() -> None:
    class Module:
        current = torch.device("cuda:0")

        @contextmanager
        def device(self, device: int) -> Iterator[None]:
            before, self.current = self.current, torch.device("cuda", device)
            yield
            self.current = before

        def is_current_stream_capturing(self) -> bool:
            return self.current == torch.device("cuda:1")

    with patch.object(streams, "stream_module", return_value=Module()):
        found = [is_capturing(torch.device("cuda", index)) for index in (0, 1, 2)]
    assert found == [False, True, False]


def claiming(buffer: torch.Tensor) -> Callable[[], None]:
    return lambda: claim(buffer, "buffer")


SHARED = r"buffer must not be shared by parts of a fork"


def test_a_buffer_is_refused_to_a_second_part_of_a_fork(recorded_streams: Any) -> None:
    buffer = torch.zeros(1)
    with pytest.raises(ValueError, match=SHARED):
        fork_join(CPU, claiming(buffer), claiming(buffer))
    with pytest.raises(ValueError, match=SHARED):
        fork_join(CPU, nothing, claiming(buffer), claiming(buffer))

    def nested() -> None:
        fork_join(CPU, nothing, claiming(buffer))

    with pytest.raises(ValueError, match=SHARED):
        fork_join(CPU, nested, claiming(buffer))
    with pytest.raises(ValueError, match=SHARED):
        fork_join(CPU, nothing, nested, nested)


def test_buffers_of_one_part_are_not_taken_for_those_that_another_part_has_dropped(
    recorded_streams: Any,
) -> None:
    def passing() -> None:
        # an object that is freed leaves its id to the next one
        for _ in range(100):
            claim(torch.zeros(1), "buffer")

    fork_join(CPU, passing, passing, passing)


def test_a_buffer_is_free_for_whatever_runs_before_or_behind(recorded_streams: Any) -> None:
    buffer, other = torch.zeros(1), torch.zeros(1)

    def again() -> None:
        claim(buffer, "buffer")
        fork_join(CPU, claiming(other), claiming(buffer))
        fork_join(CPU, claiming(buffer), claiming(other))
        claim(buffer, "buffer")

    for parts in ((again, nothing), (nothing, again)):
        claim(buffer, "buffer")
        fork_join(CPU, *parts)
    claim(buffer, "buffer")
