"""The order in which the cases of a session run: the longest first, the same mixture on each GPU.

pytest-xdist hands each worker a piece of the list, in the order of the workers, and moves what is
left from one worker to another only when that has nothing to do. Workers are pinned to GPUs in
turns (`pinning.py`). If the longest cases were simply first, all would begin on one GPU, and
wait there for the memory that large cases share, while that of the other GPUs is free.

Engines and whole MoE layers compile most, whatever their size: on an H200 a case of such a layer
takes three times as long as one of another site. Each worker begins with some of them. One worker
with all of them would end minutes after the others, and one of them that was the last case of a
worker would keep all others waiting. An engine is a process of its own, whose start takes longest;
its draws are dealt one by one: with 20 draws of each case four H200 were idle for 5 of 25 minutes,
but for the later draws of the engines of a few workers. The first draws of all engines come first,
since an engine loads what an earlier draw of its case has compiled and stored: draws that begin at
the same time all compile the same (40 s each with vLLM).

A case that runs alone (`turns.py`) is the first of its worker, and all others wait for it. It
costs the worker, which is replaced while the others are at work. Where workers are too few, they
are last: each begins when no other worker has a case.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, zip_longest
from typing import TypeVar

import pytest

from loragate.matrix.case import Site
from loragate.matrix.case_run import CaseRun

WORKER_INPUT_GPUS = "loragate_gpus"

# the sites whose cases take longest to compile
_DEALT = (Site.ENGINE, Site.MOE_LAYER)

_Item = TypeVar("_Item")


@dataclass(frozen=True, slots=True)
class Workers:
    """Of a session, and the GPUs that they are pinned to in turns."""

    count: int
    gpus: int


def workers_of(config: pytest.Config) -> Workers:
    """As a worker knows them. In any other process there are none, or the order means nothing."""
    worker_input = getattr(config, "workerinput", {})
    count = worker_input.get("workercount", 1)
    return Workers(count, min(count, worker_input.get(WORKER_INPUT_GPUS, 1)))


def may_begin(alone: Sequence[CaseRun], workers: Workers) -> bool:
    """Whether the runs that run alone can be the first ones of a worker each, with some left that
    run the other cases when these workers are lost. Draws of one case run on one worker."""
    return len({run.run_id for run in alone}) == len(alone) < workers.count


def begin_alone(number: int, workers: int) -> range:
    """The workers whose first cases are the `number` of those that run alone and may begin."""
    return range(workers - number, workers)


def running_order(
    runs: Sequence[CaseRun],
    *,
    durations: Mapping[str, float],
    workers: Workers,
    alone: Callable[[CaseRun], bool] = lambda run: False,
) -> list[CaseRun]:
    """Longest first by the recorded seconds of the cases, by their size where none are recorded,
    and first or last those that run `alone`. The draws and repeats of a case stay together, but for
    those of engines."""

    def size(run: CaseRun) -> int:
        return run.case.tokens * run.case.top_k

    known = [run for run in runs if run.run_id in durations]
    unknown = [run for run in runs if run.run_id not in durations]
    # stable: runs of one case are neighbours and stay so
    longest = [
        # nothing is known of a new case, which might take long
        *sorted(unknown, key=size, reverse=True),
        *sorted(known, key=lambda run: (-durations[run.run_id], run.run_id)),
    ]
    cases = [list(group) for _, group in groupby(longest, key=lambda run: run.run_id)]
    lone = [case for case in cases if alone(case[0])]
    begin = may_begin([run for case in lone for run in case], workers)
    beside = [case for case in cases if not alone(case[0])]
    engines = [case for case in beside if case[0].case.site is Site.ENGINE]
    layers = [case for case in beside if case[0].case.site is Site.MOE_LAYER]
    others = [case for case in beside if case[0].case.site not in _DEALT]
    dealt = [*(lone if begin else ()), *_one_of_each_in_turn(engines), *layers]
    return spread_over_gpus(others, workers, dealt=dealt, last=[] if begin else lone)


def _one_of_each_in_turn(cases: Sequence[Sequence[CaseRun]]) -> list[Sequence[CaseRun]]:
    """The first runs of all cases, then their second runs, and so on, each by itself."""
    return [[run] for turn in zip_longest(*cases) for run in turn if run is not None]


def spread_over_gpus(
    longest_first: Sequence[Sequence[_Item]],
    workers: Workers,
    *,
    dealt: Sequence[Sequence[_Item]] = (),
    last: Sequence[Sequence[_Item]] = (),
) -> list[_Item]:
    """The items of groups that stay together, as a list whose pieces, one a worker, give each GPU
    every n-th group. Each piece begins with its share of `dealt`, of which the last worker has the
    first, and the last piece ends with `last`."""
    of_gpu = [deque(_flat(longest_first[gpu :: workers.gpus])) for gpu in range(workers.gpus)]
    ending = _flat(last)
    most, ordered = sum(map(len, of_gpu)) + len(_flat(dealt)), list[_Item]()
    for worker in range(workers.count):
        # as many as xdist is going to send to this worker: a piece that is longer or shorter by one
        # would leave the first item of the next one to the end of this one
        size = (most + len(ending) - len(ordered)) // (workers.count - worker)
        size = min(size, most - len(ordered))
        # the last pieces may be longer by one
        first = _flat(dealt[workers.count - 1 - worker :: workers.count])
        ordered += first
        own = of_gpu[worker % workers.gpus]
        # shares of groups of unequal size may be longer than a piece, or leave others too few
        for _ in range(min(size - len(first), sum(map(len, of_gpu)))):
            source = own or max(of_gpu, key=len)
            ordered.append(source.popleft())
    return [*ordered, *ending]


def _flat(groups: Sequence[Sequence[_Item]]) -> list[_Item]:
    return [item for group in groups for item in group]
