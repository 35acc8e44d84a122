"""What the host does between two replays of a captured step.

A machine that others share is slow for a while now and then, for seconds and by a factor of two to
four. Rounds are therefore spread over a whole run, and a figure is the median over them; that of
the quietest round says how much of it was the machine's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from unittest.mock import patch

import torch
from torch import Tensor

from loragate.bench.graphs_figures import HostFigures
from loragate.bench.graphs_rows import MAX_TOKENS, HostRow
from loragate.bench.lorakernels_decode import DecodeSteps
from lorakernels.serving.graph_runner import GraphRunner

_ROUNDS = 9
# of each step in a round
_TURNS = 80
_WARM_UP = 5

Step = Callable[[], Tensor]


@dataclass(frozen=True, slots=True)
class HostTime:
    """Microseconds of the host for a step: for the launch of its graph, and for all the rest."""

    beside_us: float
    launch_us: float


@dataclass(slots=True)
class HostTurns:
    """The rounds of some rows, each with the times of all of these."""

    rows: Sequence[HostRow]
    steps: Sequence[Step]
    rounds: list[list[HostTime]] = field(default_factory=list)

    def take(self) -> None:
        """One more round."""
        self.rounds.append(_round(self.steps))

    def figures(self) -> list[HostFigures]:
        """Of each row, over at least `_ROUNDS` rounds."""
        if not self.rows:
            return []
        while len(self.rounds) < _ROUNDS:
            self.take()
        of_rows = zip(*self.rounds, strict=True)
        return [_over_rounds(row, times) for row, times in zip(self.rows, of_rows, strict=True)]


@contextmanager
def host_turns(rows: Sequence[HostRow], models: Sequence[DecodeSteps]) -> Iterator[HostTurns]:
    """Each row has a captured step of its model, of as many tokens as it takes at most."""
    with ExitStack() as adapters:
        for model in models:
            adapters.enter_context(model.adapters())
        yield HostTurns(rows, [_step(*pair) for pair in zip(rows, models, strict=True)])


def _over_rounds(row: HostRow, times: Sequence[HostTime]) -> HostFigures:
    beside, launch = [one.beside_us for one in times], [one.launch_us for one in times]
    return HostFigures(row, median(beside) + median(launch), median(launch), min(beside))


def _step(row: HostRow, model: DecodeSteps) -> Step:
    runner = GraphRunner(model.step, model.inputs, model.buffers, sizes=[MAX_TOKENS])
    runner.capture()
    slots = torch.arange(MAX_TOKENS, dtype=torch.int32) % row.slots
    return partial(runner.run, slots, ids=torch.arange(MAX_TOKENS))


def _round(steps: Sequence[Step]) -> list[HostTime]:
    """For each step the medians of its turns; a turn is the time until the step has been queued,
    with nothing queued before it.

    The steps take turns, forwards and backwards: what disturbs the machine for a while disturbs all
    of them, and of two steps each follows as often on itself as on the other, whose kernels the
    host waits for before it."""
    launches: list[float] = []
    replay = torch.cuda.CUDAGraph.replay

    def timed(graph: torch.cuda.CUDAGraph) -> None:
        start = time.perf_counter()
        replay(graph)
        launches.append(time.perf_counter() - start)

    # of each step, what a turn took beside the launch, and the launch
    turns: list[list[tuple[float, float]]] = [[] for _ in steps]
    numbers = range(len(steps))
    with patch.object(torch.cuda.CUDAGraph, "replay", timed):
        for turn in range(_WARM_UP + _TURNS):
            for number in reversed(numbers) if turn % 2 else numbers:
                torch.cuda.synchronize()
                start = time.perf_counter()
                steps[number]()
                whole = time.perf_counter() - start
                (launch,) = launches
                launches.clear()
                turns[number].append((whole - launch, launch))
    return [_medians(of_step[_WARM_UP:]) for of_step in turns]


def _medians(turns: Sequence[tuple[float, float]]) -> HostTime:
    beside, launch = (median(seconds) * 1e6 for seconds in zip(*turns, strict=True))
    return HostTime(beside, launch)
