"""`python -m loragate.bench.speed.worker KIND FOLDER`: the build of lorakernels in a folder, whose
calls are timed a round at a time, whenever the parent asks.

The parent writes one line of JSON for each order, and gets one for each answer (`orders.py`). What
this process or a compiler prints goes to stderr.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from loragate.bench.compiling import Measure, compile_ahead
from loragate.bench.contender import Contender, Unavailable, WrongResult, find_contender
from loragate.bench.kinds import KINDS, Kind
from loragate.bench.speed.builds import PACKAGE
from loragate.bench.speed.orders import Answer, Begin, Channel, Order, Problem
from loragate.bench.timer import graph_of, replay_in_turns
from loragate.core.errors import CommandError
from loragate.core.machine import Machine, detect_machine, select_interpreter
from loragate.core.traces import error_and_place
from loragate.core.verdict import ExitCode

_Key = TypeVar("_Key", bound=Hashable)
# takes calls, and returns what times one round of them
Timer = Callable[[Mapping[Any, Callable[[], object]]], Callable[[], Mapping[Any, float]]]

# another process has used the device since the last round
_WARM_UPS = 1
_REPLAYS = 3


class RoundClock:
    """The Clock of a worker: the calls are timed once for each order, until the next row."""

    def __init__(self, channel: Channel, timer: Timer) -> None:
        self._channel, self._timer = channel, timer

    def __call__(self, calls: Mapping[_Key, Callable[[], object]]) -> dict[_Key, float]:
        """Microseconds of the last round."""
        time_round = self._timer(calls)
        self._channel.answer(Answer(calls=tuple(map(str, calls))))
        times: Mapping[_Key, float] = dict.fromkeys(calls, 0.0)
        while self._channel.order() is Order.TIME:
            times = time_round()
            self._channel.answer(Answer(us=tuple(times[name] for name in calls)))
        return dict(times)


def graph_timer(
    calls: Mapping[_Key, Callable[[], object]],
) -> Callable[[], dict[_Key, float]]:
    """The Timer of a GPU: replays of CUDA graphs."""
    graphs = {name: graph_of(call) for name, call in calls.items()}
    return lambda: replay_in_turns(graphs, replays=_REPLAYS, warm_ups=_WARM_UPS)


def serve(
    channel: Channel,
    measure: Measure,
    rows: Sequence[Any],
    candidate: Contender,
    machine: Machine,
    timer: Timer,
) -> None:
    """Answer the orders of the parent, row by row in the order of `rows`."""
    clock = RoundClock(channel, timer)
    figures = measure(candidate, None, rows, machine, clock, _say)
    for row, measured in zip(rows, figures, strict=True):
        found: Any = measured
        assert found.row.id == row.id, f"measured {found.row.id} in place of {row.id}"


def main(kind_name: str, folder: str) -> int:
    channel = _private_channel()
    try:
        begin = channel.begin()
        _check_package(Path(folder))
        kind = KINDS[kind_name]
        rows = _rows(kind, begin)
        candidate, machine = find_contender(PACKAGE), detect_machine()
        if begin.compiles:
            compile_ahead(kind.measure, [PACKAGE], rows, _say)
            channel.answer(Answer())
        else:
            serve(channel, kind.measure, rows, candidate, machine, graph_timer)
    except WrongResult as error:
        channel.answer(Problem(str(error), ExitCode.WRONG))
    except Unavailable as error:
        channel.answer(Problem(str(error), error.code))
    except CommandError as error:
        channel.answer(Problem(str(error), error.exit_code))
    # an older build may lack what the harness needs, in any way
    except Exception as error:
        channel.answer(Problem(error_and_place(error), ExitCode.INFRASTRUCTURE))
    return ExitCode.OK.value


def _private_channel() -> Channel:
    """stdout as it is now, which from here on is stderr for everybody else."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return Channel(sys.stdin, answers)


def _check_package(folder: Path) -> None:
    select_interpreter()
    import lorakernels

    found = Path(str(lorakernels.__file__)).resolve()
    assert found.is_relative_to(folder.resolve()), f"imported {found}, not the build in {folder}"


def _rows(kind: Kind, begin: Begin) -> list[Any]:
    """The rows in the order of the table, in which `measure` takes them."""
    table = kind.rows() if begin.seed is None else kind.rows(begin.seed)
    return [row for row in table if row.id in begin.rows]


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
