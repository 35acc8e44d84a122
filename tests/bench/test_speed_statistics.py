from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import pytest

from loragate.bench.rows import BASE, BEHIND_BASE
from loragate.bench.speed import comparing
from loragate.bench.speed.comparing import judge_rows
from loragate.bench.speed.figures import ResourcePairs, SpeedFigures
from loragate.bench.speed.rounds import MOST_PROCESSES, Lanes, sample_row
from loragate.bench.speed.statistics import Change, Comparison, Samples, compare
from loragate.core.errors import CommandError
from loragate.core.verdict import ExitCode

CALLS = ("delta", "base and delta")
# of equal code
_RUNS = 300
# path, batch: calls of 2 to 400 us
ROWS = tuple(f"{path}.m{tokens}" for path in ("one_shot", "two_kernels") for tokens in range(1, 11))


@dataclass
class Gpu:
    """A device whose clock drifts and jumps, and that is now and then used by somebody else.

    Times of one row have noise of their own, more where they are short, and each process has its
    memory elsewhere, which shifts all its times of a row a little.
    """

    generator: np.random.Generator
    now: float = 0.0
    step: float = 1.0
    slow: Callable[[int, str], float] = lambda build, row: 1.0
    # standard deviation of what a process adds to a row of short calls
    places: float = 0.004
    opened: list[Sequence[str]] = field(default_factory=list)

    def speed(self) -> float:
        self.now += 1.0
        if self.generator.random() < 0.002:
            self.step = self.generator.choice([1.0, 1.08, 1.15])
        drift = 1 + 0.03 * math.sin(self.now / 700) + 0.00001 * self.now
        outlier = self.generator.exponential(0.5) if self.generator.random() < 0.02 else 0.0
        return drift * self.step * (1 + outlier)

    @contextmanager
    def lanes(self, rows: Sequence[str]) -> Iterator[Lanes]:
        self.opened.append(rows)
        yield [
            [SimulatedLane(self, build, iter(rows)) for _ in range(MOST_PROCESSES)]
            for build in range(2)
        ]


@dataclass
class SimulatedLane:
    gpu: Gpu
    build: int
    rows: Iterator[str]

    def calls(self) -> tuple[str, ...]:
        row = next(self.rows)
        short = 2.0 * 1.7 ** int(row.rpartition("m")[2])
        self.noise = 0.01 / math.sqrt(short) + 0.001
        shift = self.gpu.generator.normal(0, self.gpu.places / math.sqrt(short), 2)
        slow = self.gpu.slow(self.build, row)
        self.us = np.array([short * slow, short * slow + 3 * short]) * (1 + shift)
        return CALLS

    def time(self) -> tuple[float, ...]:
        noise = self.gpu.generator.normal(1, self.noise, 2)
        return tuple(float(us * self.gpu.speed() * e) for us, e in zip(self.us, noise, strict=True))

    def leave(self) -> None:
        self.us = np.array([math.nan, math.nan])


def judged(gpu: Gpu, rows: Sequence[str] = ROWS) -> dict[tuple[str, str], Comparison]:
    return {(i.row, i.call): i for i in judge_rows(rows, gpu.lanes, lambda line: None)}


def figures(found: Sequence[Comparison]) -> SpeedFigures:
    return SpeedFigures("dense", "main", tuple(found), ResourcePairs("sm_90"))


def test_twenty_runs_of_equal_code_raise_no_alarm() -> None:
    for seed in range(20):
        found = judged(Gpu(np.random.default_rng(seed)))
        assert len(found) == len(ROWS) * len(CALLS)
        assert figures(list(found.values())).exit_code is ExitCode.OK, seed


@pytest.mark.parametrize("seed", range(3))
def test_a_slow_down_of_5_percent_on_one_path_is_found_and_nothing_else(seed: int) -> None:
    def slow(build: int, row: str) -> float:
        return 1.05 if build == 1 and row.startswith("one_shot") else 1.0

    gpu = Gpu(np.random.default_rng(seed), slow=slow)
    found = judged(gpu)
    slower = {key for key, item in found.items() if item.change is Change.SLOWER}
    assert slower >= {(row, "delta") for row in ROWS if row.startswith("one_shot")}
    assert all(row.startswith("one_shot") for row, _ in slower)
    assert figures(list(found.values())).exit_code is ExitCode.WRONG
    # what changed was measured by new processes as well
    assert [len(rows) for rows in gpu.opened] == [20, 10]


def test_a_speed_up_is_shown_and_is_no_failure() -> None:
    gpu = Gpu(np.random.default_rng(1), slow=lambda build, row: 1.0 if build == 0 else 0.9)
    found = judged(gpu, ROWS[:5])
    deltas = [item for item in found.values() if item.call == "delta"]
    assert {item.change for item in deltas} == {Change.FASTER}
    assert all(item.low < item.ratio < item.high < 1 / item.limit for item in deltas)
    assert figures(deltas).exit_code is ExitCode.OK


def test_where_noise_could_hide_5_percent_a_row_is_undecided() -> None:
    found = judged(Gpu(np.random.default_rng(2), places=0.3), ROWS[:4])
    assert {item.change for item in found.values()} == {Change.UNDECIDED}
    assert figures(list(found.values())).exit_code is ExitCode.INCOMPLETE


def test_a_change_that_new_processes_do_not_show_is_undecided(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sessions: list[int] = []

    def slow(build: int, row: str) -> float:
        return 1.1 if build == 1 and len(gpu.opened) == 1 else 1.0

    gpu = Gpu(np.random.default_rng(3), slow=slow)
    monkeypatch.setattr(comparing, "_sample", counted(comparing._sample, sessions))
    found = judged(gpu, ROWS[3:6])
    assert found["one_shot.m4", "delta"].change is Change.UNDECIDED
    assert len(sessions) == 2


@pytest.mark.parametrize(("slow", "change"), [(1.0, Change.UNCHANGED), (1.07, Change.SLOWER)])
def test_more_processes_decide_what_six_of_each_build_leave_undecided(
    slow: float, change: Change
) -> None:
    # as on an H200, where the processes of one call are 2 % apart
    gpu = Gpu(np.random.default_rng(3), places=0.06, slow=lambda build, row: slow if build else 1.0)
    found = judged(gpu, ROWS[1:2])
    assert found[ROWS[1], "delta"].change is change
    assert len(gpu.opened) > 1


@dataclass
class ApartLane:
    """Without noise, but for how far the process is from the others of its build. The last row
    takes longer with the present build."""

    build: int
    apart: float
    effect: float
    rows: Iterator[str]

    def calls(self) -> tuple[str, ...]:
        is_slow = self.build == 1 and next(self.rows) == ROWS[-1]
        self.us = 100.0 * math.exp(self.apart + (self.effect if is_slow else 0.0))
        return ("delta",)

    def time(self) -> tuple[float, ...]:
        return (self.us,)

    def leave(self) -> None:
        self.us = math.nan


# of 20 equal calls, chance moves one by 3 standard deviations in 5 % of all runs, and by 4.2 in
# one run of 2000
@pytest.mark.parametrize(("deviations", "is_slower"), [(3.0, False), (4.2, True)])
def test_a_call_that_alone_is_measured_again_is_still_judged_as_one_of_all_calls(
    deviations: float, is_slower: bool
) -> None:
    apart, opened = 0.015, list[Sequence[str]]()
    of_process = apart * math.sqrt(MOST_PROCESSES / (MOST_PROCESSES - 1))
    # of the difference of two builds with twice as many processes each
    deviation = of_process * math.sqrt(2 / (2 * MOST_PROCESSES))

    @contextmanager
    def lanes(rows: Sequence[str]) -> Iterator[Lanes]:
        opened.append(rows)
        yield [
            [
                ApartLane(build, sign * apart, deviations * deviation, iter(rows))
                for sign in (-1, 1) * (MOST_PROCESSES // 2)
            ]
            for build in range(2)
        ]

    *others, last = judge_rows(ROWS, lanes, lambda line: None)
    assert opened[:2] == [ROWS, [ROWS[-1]]]
    assert {item.change for item in others} == {Change.UNCHANGED}
    assert (last.change is Change.SLOWER) is is_slower, last


def test_processes_of_another_measurement_count_against_each_other_alone() -> None:
    first, again = samples(0.0, 0.01), samples(0.0, 0.01)
    # the device was slower by a tenth meanwhile
    again = Samples("row", "call", again.us * 1.1)
    joined = first.with_more(again)
    assert joined.processes == 4
    assert joined.scatter == pytest.approx(first.scatter * 2 / 3, rel=1e-3)
    assert np.allclose(joined.effects, 0.0)


def counted(function: Callable[..., object], calls: list[int]) -> Callable[..., object]:
    def call(*arguments: object) -> object:
        calls.append(len(calls))
        return function(*arguments)

    return call


def samples(effect: float, apart: float, row: str = "row") -> Samples:
    """The builds differ by `effect`, the processes of each build by `apart`, the rounds not."""
    us = np.full((2, 2, 10), 100.0)
    us[1] *= 1 + effect
    us[:, 1] *= 1 + apart
    return Samples(row, "call", us)


def test_the_limit_is_set_by_how_far_the_processes_of_one_build_are_apart() -> None:
    (calm,) = compare([samples(0.03, 0.0)])
    assert (calm.limit, calm.change) == (pytest.approx(1.01), Change.SLOWER)
    (noisy,) = compare([samples(0.03, 0.02)])
    assert noisy.limit > 1.05
    assert noisy.change is Change.UNDECIDED


def test_the_limit_of_a_call_allows_for_all_judgements_that_share_the_chance_of_an_alarm() -> None:
    (alone,) = compare([samples(0.0, 0.02)])
    (one_of_many,) = compare([samples(0.0, 0.02)], judgements=100)
    assert one_of_many.limit > alone.limit


def test_a_row_with_more_noise_than_the_others_is_judged_by_its_own() -> None:
    quiet = [samples(0.0, 0.001, f"row {n}") for n in range(30)]
    *_, last = compare([*quiet, samples(0.02, 0.02)])
    assert last.change is not Change.SLOWER
    *_, last = compare([*quiet, samples(0.02, 0.001)])
    assert last.change is Change.SLOWER


def test_a_call_whose_processes_are_in_two_states_hides_nothing_in_the_others() -> None:
    quiet = [samples(0.0, 0.001 * (1 + n % 3), f"row {n}") for n in range(4)]
    slow = samples(0.05, 0.002)
    *_, alone = compare([*quiet, slow])
    # as on an H200: five calls alike, and one whose processes are a tenth apart
    *_, beside, noisy = compare([*quiet, slow, samples(0.03, 0.1)])
    assert alone.change is beside.change is Change.SLOWER
    assert beside.limit < 1.02
    # its own noise counts for itself
    assert noisy.change is Change.UNDECIDED
    assert noisy.limit > 1.2


def test_calls_that_are_all_noisy_are_pooled() -> None:
    found = compare([samples(0.0, apart, f"row {apart}") for apart in (0.02, 0.03, 0.04, 0.05)])
    assert len({item.limit for item in found[:2]}) == 1
    assert found[0].limit > 1.05


@pytest.mark.parametrize("calls", [4, 6, 30])
def test_chance_raises_an_alarm_in_one_run_of_a_hundred_however_few_calls_there_are(
    calls: int,
) -> None:
    generator = np.random.default_rng(calls)
    alarms = 0
    for _ in range(_RUNS):
        us = 100 * np.exp(generator.normal(0, 0.02, (calls, 2, 2, 1)) + np.zeros((1, 1, 1, 3)))
        found = compare([Samples(f"row {n}", "call", us[n]) for n in range(calls)])
        alarms += any(item.change in (Change.SLOWER, Change.FASTER) for item in found)
    # three standard deviations beyond 1 %
    assert alarms <= _RUNS * 0.01 + 3 * math.sqrt(_RUNS * 0.01 * 0.99)


def test_more_rows_raise_the_limit_of_each() -> None:
    few = compare([samples(0.0, 0.01) for _ in range(10)])
    many = compare([samples(0.0, 0.01) for _ in range(10)] * 10)
    quantile = [math.log(found[0].limit) for found in (few, many)]
    assert quantile[1] > 0.9 * quantile[0]
    assert math.log(few[0].limit) > 3 * samples(0.0, 0.01).scatter ** 0.5


class WithBase(SimulatedLane):
    """The base product takes longer or shorter in each process, alone and before a delta."""

    def calls(self) -> tuple[str, ...]:
        super().calls()
        base = 15.0 * (1 + self.gpu.generator.normal(0, 0.03))
        self.us = np.array([base, base + 5.0 * self.gpu.slow(self.build, "")])
        return BASE, BEHIND_BASE


@pytest.mark.parametrize("slow", [1.0, 1.2])
def test_where_the_base_lies_in_memory_says_nothing_of_what_runs_behind_it(slow: float) -> None:
    gpu = Gpu(np.random.default_rng(6), slow=lambda build, row: slow if build else 1.0)

    def lanes() -> Lanes:
        return [
            [WithBase(gpu, build, iter(ROWS)) for _ in range(MOST_PROCESSES)] for build in range(2)
        ]

    alone = sample_row(ROWS[0], lanes(), gpu.generator)
    assert compare(alone)[1].change is Change.UNDECIDED
    # 20 % of a delta of 5 us behind a base of 15 us
    (found,) = compare(sample_row(ROWS[0], lanes(), gpu.generator, {BEHIND_BASE: BASE}))
    assert found.call == BEHIND_BASE
    assert found.change is (Change.SLOWER if slow > 1 else Change.UNCHANGED)
    assert found.ratio == pytest.approx(1 + (slow - 1) / 4, abs=0.01)
    # on the scale of what was measured
    assert found.before_us == pytest.approx(20.0, rel=0.3)


class OtherCalls(SimulatedLane):
    def calls(self) -> tuple[str, ...]:
        super().calls()
        return ("delta",)


def test_builds_with_different_calls_are_not_compared() -> None:
    gpu = Gpu(np.random.default_rng(4))
    lanes = [[SimulatedLane(gpu, 0, iter(ROWS))], [OtherCalls(gpu, 1, iter(ROWS))]]
    with pytest.raises(CommandError, match="the builds have different calls") as caught:
        sample_row(ROWS[0], lanes, gpu.generator)
    assert caught.value.exit_code is ExitCode.INCOMPLETE


def test_the_builds_take_turns_in_an_order_that_changes_from_round_to_round() -> None:
    gpu, order = Gpu(np.random.default_rng(5)), []

    class Noted(SimulatedLane):
        def time(self) -> tuple[float, ...]:
            order.append(self.build)
            return super().time()

    lanes = [[Noted(gpu, build, iter(ROWS)) for _ in range(MOST_PROCESSES)] for build in range(2)]
    sample_row(ROWS[0], lanes, gpu.generator)
    rounds = [
        tuple(order[i : i + 2 * MOST_PROCESSES]) for i in range(0, len(order), 2 * MOST_PROCESSES)
    ]
    assert all(sum(of_round) == MOST_PROCESSES for of_round in rounds)
    assert len(set(rounds)) > 3
