from __future__ import annotations

from itertools import pairwise

import pytest

from loragate.matrix.case import Case, Dtype, Site
from loragate.matrix.case_run import CaseRun
from loragate.plugin.running_order import Workers, begin_alone, running_order, spread_over_gpus

ALONE = Workers(1, 1)


def run_of(tokens: int, draw: int = 0) -> CaseRun:
    case = Case(
        site=Site.DENSE_DELTA,
        tokens=tokens,
        in_features=32,
        slices=(16,),
        rank=8,
        slots=4,
        dtype=Dtype.FP32,
    )
    return CaseRun("mine", case, draw)


def single(items: range) -> list[list[int]]:
    return [[item] for item in items]


def pieces(items: list[int], workers: int) -> list[list[int]]:
    """What xdist sends to each worker."""
    left, found = list(items), []
    for worker in range(workers):
        size = len(left) // (workers - worker)
        found.append(left[:size])
        left = left[size:]
    return found


@pytest.mark.parametrize("gpus", [1, 2, 3, 4])
@pytest.mark.parametrize("number", [7, 32, 101, 661])
def test_each_gpu_gets_the_same_mixture_of_long_and_short_items(gpus: int, number: int) -> None:
    workers = gpus * 3
    ordered = spread_over_gpus(single(range(number)), Workers(workers, gpus))
    assert sorted(ordered) == list(range(number))
    sent = pieces(ordered, workers)
    of_gpus = [sorted(i for piece in sent[gpu::gpus] for i in piece) for gpu in range(gpus)]
    if number > workers:
        # the longest of all begin on different GPUs
        assert [items[0] for items in of_gpus] == list(range(gpus))
    # between two neighbours of a GPU there is about one item of each other
    gaps = [later - earlier for items in of_gpus for earlier, later in pairwise(items)]
    assert max(gaps) <= 2 * gpus
    # longest first within a worker
    assert all(piece == sorted(piece) for piece in sent[: workers // 2])


def test_on_one_gpu_the_list_is_longest_first() -> None:
    assert spread_over_gpus(single(range(9)), Workers(4, 1)) == list(range(9))


@pytest.mark.parametrize("gpus", [1, 2])
@pytest.mark.parametrize(
    ("dealt", "number", "alone"),
    [
        *((0, 9, 0), (3, 40, 0), (11, 40, 0), (13, 0, 0), (8, 1, 0)),
        *((0, 9, 1), (3, 40, 1), (3, 40, 3), (11, 40, 1), (11, 40, 3)),
    ],
)
def test_what_is_dealt_begins_on_all_workers_alike_and_what_is_last_ends_the_list(
    dealt: int, number: int, alone: int, gpus: int
) -> None:
    items = range(dealt, dealt + number)
    last = range(dealt + number, dealt + number + alone)
    ordered = spread_over_gpus(
        single(items), Workers(4, gpus), dealt=single(range(dealt)), last=single(last)
    )
    assert sorted(ordered) == list(range(dealt + number + alone))
    assert ordered[len(ordered) - alone :] == list(last)
    shares = [[item < dealt for item in piece] for piece in pieces(ordered, 4)]
    assert all(share == sorted(share, reverse=True) for share in shares)
    counts = [sum(share) for share in shares]
    assert max(counts) - min(counts) <= 1


def compiling_run_of(site: Site, slots: int, draw: int = 0) -> CaseRun:
    """A case that takes long, though it has no more than one row."""
    return CaseRun("mine", Case(site=site, rank=8, slots=slots, dtype=Dtype.FP32), draw)


def test_engines_and_then_whole_moe_layers_are_dealt_to_the_workers() -> None:
    sites = [Site.MOE_LAYER, Site.ENGINE] * 2
    compiling = [compiling_run_of(site, slots) for slots, site in enumerate(sites, start=2)]
    runs = [*(run_of(tokens) for tokens in range(1, 7)), *compiling]
    ordered = running_order(runs, durations={}, workers=Workers(2, 1))
    others = [Site.DENSE_DELTA] * 3
    assert [run.case.site for run in ordered] == [Site.ENGINE, Site.MOE_LAYER, *others] * 2


@pytest.mark.parametrize("gpus", [1, 2, 4])
def test_draws_of_an_engine_begin_on_all_workers_and_those_of_other_cases_stay_together(
    gpus: int,
) -> None:
    engines = [compiling_run_of(Site.ENGINE, slots, draw) for slots in (2, 3) for draw in range(20)]
    layers = [
        compiling_run_of(Site.MOE_LAYER, slots, draw) for slots in range(2, 9) for draw in range(20)
    ]
    others = [run_of(tokens, draw) for tokens in range(1, 40) for draw in range(20)]
    ordered = running_order([*others, *layers, *engines], durations={}, workers=Workers(8, gpus))
    assert sorted(run.id for run in ordered) == sorted(
        run.id for run in [*others, *layers, *engines]
    )
    sent = [[ordered[n] for n in piece] for piece in pieces(list(range(len(ordered))), 8)]
    assert [[run.case.site is Site.ENGINE for run in piece[:6]] for piece in sent] == [
        [True] * 5 + [False]
    ] * 8
    # a case is on one worker, or on two where one of them has no more runs to do
    cases = {run.run_id for run in [*others, *layers]}
    parts = [sum(any(run.run_id == case for run in piece) for piece in sent) for case in cases]
    assert max(parts) <= 2
    assert parts.count(2) <= 8


def test_the_first_draws_of_all_engines_begin_before_later_draws() -> None:
    cases = [
        [compiling_run_of(Site.ENGINE, slots, draw) for draw in range(3)] for slots in (2, 3, 4)
    ]
    cases[1] = cases[1][:2]
    durations = {
        case[0].run_id: seconds for case, seconds in zip(cases, (9.0, 5.0, 7.0), strict=True)
    }
    runs = [run for case in cases for run in case]
    ordered = running_order(runs, durations=durations, workers=Workers(1, 1))
    assert [(run.draw, run.case.slots) for run in ordered] == [
        *((0, 2), (0, 4), (0, 3)),
        *((1, 2), (1, 4), (1, 3)),
        *((2, 2), (2, 4)),
    ]


@pytest.mark.parametrize("draws", [1, 3, 20])
@pytest.mark.parametrize("cases", [0, 1, 5])
def test_every_draw_runs_whatever_the_sizes_of_the_shares(cases: int, draws: int) -> None:
    layers = [
        compiling_run_of(Site.MOE_LAYER, slots, draw)
        for slots in (2, 3, 4)
        for draw in range(draws)
    ]
    others = [run_of(tokens, draw) for tokens in range(cases) for draw in range(draws)]
    ordered = running_order([*layers, *others], durations={}, workers=Workers(4, 2))
    assert sorted(run.id for run in ordered) == sorted(run.id for run in [*layers, *others])


def test_the_order_is_by_size_or_by_recorded_seconds_with_new_cases_first() -> None:
    runs = [run_of(1), run_of(2), run_of(3)]
    by_size = running_order(runs, durations={}, workers=ALONE)
    assert [run.case.tokens for run in by_size] == [3, 2, 1]
    seconds = {run_of(1).run_id: 5.0, run_of(3).run_id: 1.0}
    by_time = running_order(runs, durations=seconds, workers=ALONE)
    assert [run.case.tokens for run in by_time] == [2, 1, 3]


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_what_runs_alone_is_last_with_all_of_its_draws(workers: int) -> None:
    runs = [run_of(tokens, draw) for tokens in (1, 9, 3, 4) for draw in range(2)]
    ordered = running_order(
        runs, durations={}, workers=Workers(workers, 1), alone=lambda run: run.case.tokens == 9
    )
    assert sorted(run.id for run in ordered) == sorted(run.id for run in runs)
    assert [(run.case.tokens, run.draw) for run in ordered[-2:]] == [(9, 0), (9, 1)]


@pytest.mark.parametrize(("workers", "are_first"), [(2, False), (3, True), (4, True)])
def test_what_runs_alone_begins_on_workers_of_its_own_if_others_are_left(
    workers: int, are_first: bool
) -> None:
    engine = compiling_run_of(Site.ENGINE, 2)
    runs = [*map(run_of, range(1, 12)), engine]
    ordered = running_order(
        runs,
        durations={},
        workers=Workers(workers, 1),
        alone=lambda run: run.case.tokens in (4, 9) and run is not engine,
    )
    assert sorted(run.id for run in ordered) == sorted(run.id for run in runs)
    sent = pieces(list(range(len(ordered))), workers)
    begin = [ordered[piece[0]] for piece in sent]
    tokens = sorted(run.case.tokens for run in begin if run is not engine)
    assert (set(tokens) >= {4, 9}) == are_first
    assert ([run.case.tokens for run in ordered[-2:]] == [9, 4]) != are_first
    if are_first:
        # whoever starts the workers knows them by their positions
        assert {begin[position].case.tokens for position in begin_alone(2, workers)} == {4, 9}


def test_draws_of_a_case_stay_neighbours() -> None:
    runs = [run_of(tokens, draw) for tokens in (1, 2, 3, 4) for draw in range(3)]
    ordered = running_order(runs, durations={}, workers=Workers(4, 2))
    tokens = [run.case.tokens for run in ordered]
    assert sum(first != second for first, second in pairwise(tokens)) == 3
    assert [run.draw for run in ordered] == [0, 1, 2] * 4
