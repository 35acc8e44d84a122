"""Which trials a scan makes next, and on what they say that it may look first."""

from __future__ import annotations

import subprocess
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from loragate.core.checkout import changed_files
from loragate.history import PathFiles, ScanRun, TrialRecord, open_history
from loragate.history.model import glance_at
from loragate.nightly.conditions import PLAIN, Cache, Clock, Memory, Schedule
from loragate.nightly.plan import SHORT_S, next_wave, short_wave
from loragate.nightly.standing import Standing
from loragate.nightly.wave import Known, Measure, Place, Wave
from loragate.scan.since import cases_changed

NewTrial = Callable[..., TrialRecord]

_CASES = {f"case-{k}": Known(bits_s=0.1, judged_s=0.1) for k in range(8)}


def _wave(number: int, known: dict[str, Known] = _CASES, **changes: object) -> Wave:
    given: dict[str, object] = {"place": Place(workers=2), "seed": 1, "seconds_left": 600.0}
    return next_wave(known, number=number, **given | changes)  # type: ignore[arg-type]


def _cases(wave: Wave) -> list[set[str]]:
    return [{wanted.case for wanted in steps} for _, steps in wave.processes]


def test_bits_come_first_and_again_under_everything_that_must_not_matter() -> None:
    first = _wave(0)
    second = _wave(1, previous=first)
    (own, _), (stressed, again) = (
        [steps for _, steps in wave.processes] for wave in (first, second)
    )
    assert {wanted.measure for wanted in own} == {Measure.BITS}
    # the same inputs, in other orders, beside each other
    assert sorted(w.id for w in stressed) == sorted(w.id for w in again)
    assert {w.id for w in stressed} == {w.id for w in own}
    assert len({own, stressed, again}) == 3
    (stress, other) = (conditions for conditions, _ in second.processes)
    assert stress == other
    assert (stress.memory, stress.neighbours) == (Memory.POISON, 1)
    assert stress.clock is not Clock.PLAIN
    # there are no streams on a CPU, and nothing is compiled
    assert (stress.schedule, stress.cache) == (Schedule.PLAIN, Cache.WARM)


@pytest.mark.parametrize("number", range(8))
def test_no_bits_are_asked_of_a_case_that_has_none(number: int) -> None:
    known = {**_CASES, "engine": Known(has_bits=False, traced=False)}
    wave = _wave(number, known, previous=_wave(0, known) if number % 4 == 1 else None)
    wanted = [each for _, steps in wave.processes for each in steps]
    assert all(each.measure is Measure.JUDGED for each in wanted if each.case == "engine")
    # and oracles judge it without waiting for them
    is_judged = {each.measure for each in wanted} == {Measure.JUDGED} and not wave.is_alone
    assert ("engine" in {each.case for each in wanted}) == is_judged or wave.is_alone


@pytest.mark.parametrize("number", range(8))
def test_cases_without_bits_alone_are_judged_in_every_wave(number: int) -> None:
    wave = _wave(number, {"engine": Known(has_bits=False)})
    assert {each.measure for _, steps in wave.processes for each in steps} == {Measure.JUDGED}


def test_nobody_waits_for_a_long_case_that_is_to_run_alone() -> None:
    known = {**_CASES, "long": Known(bits_s=200.0, judged_s=200.0)}
    for number in (2, 6):
        assert "long" not in _cases(_wave(number, known))[0]
        # but where there is no other
        assert _cases(_wave(number, {"long": known["long"]})) == [{"long"}]


@pytest.mark.parametrize("workers", [2, 3, 8, 20])
@pytest.mark.parametrize("gpus", [(), ("0",), ("0", "1")])
def test_waves_alone_cost_all_workers_a_fortieth_of_their_time(
    workers: int, gpus: tuple[str, ...]
) -> None:
    known = {f"case-{k}": Known(bits_s=0.05) for k in range(40_000)}
    place = Place(workers=workers, gpus=gpus)
    beside, alone = (
        max(len(steps) for _, steps in _wave(number, known, place=place).processes)
        for number in (0, 2)
    )
    idle = (place.slots - max(1, len(gpus))) * alone
    assert idle / (place.slots * (3 * beside + alone)) == pytest.approx(0.025, rel=0.05)


@pytest.mark.parametrize(
    ("seconds_left", "on_cpu", "on_gpu"),
    [(2400.0, 120, 120), (1200.0, 60, 75), (600.0, 30, 75), (90.0, 10, 15), (20.0, 10, 10)],
)
def test_waves_last_longer_where_a_process_takes_longer_to_start(
    seconds_left: float, on_cpu: int, on_gpu: int
) -> None:
    known = {f"case-{k}": Known(bits_s=1.0) for k in range(1000)}
    for place, length in ((Place(), on_cpu), (Place(gpus=("0",)), on_gpu)):
        wave = _wave(0, known, place=place, seconds_left=seconds_left)
        assert [len(steps) for _, steps in wave.processes] == [length]


@pytest.mark.parametrize("number", [0, 3])
def test_trials_of_which_one_is_enough_are_divided_among_the_workers(number: int) -> None:
    wave = _wave(number, place=Place(workers=3))
    parts = [steps for _, steps in wave.processes]
    lengths = [len(part) for part in parts]
    assert max(lengths) - min(lengths) <= 1
    wanted = [each for part in parts for each in part]
    assert len(set(wanted)) == len(wanted)
    assert {each.case for each in wanted} == set(_CASES)
    # each runs beside the two others, which is a factor as well
    assert {conditions for conditions, _ in wave.processes} == {replace(PLAIN, neighbours=2)}
    assert not wave.is_alone


def test_no_worker_is_without_a_trial() -> None:
    wave = _wave(0, {"single": Known()}, place=Place(workers=3))
    assert _cases(wave) == [{"single"}] * 3


@pytest.mark.parametrize("number", [0, 1, 3, 4, 5, 7])
def test_of_cases_that_wait_for_each_others_memory_one_worker_of_each_gpu_has_all(
    number: int,
) -> None:
    large = {
        name: replace(known, is_large=name in ("case-1", "case-6"))
        for name, known in _CASES.items()
    }
    place = Place(gpus=("0", "1"), workers=3)
    previous = _wave(number - 1, large, place=place) if number % 4 == 1 else None
    cases = _cases(_wave(number, large, place=place, previous=previous))
    for first, *others in (cases[:3], cases[3:]):
        assert {"case-1", "case-6"} < first
        assert all(other and not other & {"case-1", "case-6"} for other in others)


@pytest.mark.parametrize(
    ("bits_s", "trials"),
    [
        # a wave has room for all of them
        (0.1, {8}),
        # for a part of the second ones
        (50.0, {1, 2}),
        # and for one of some
        (200.0, {0, 1}),
    ],
)
def test_a_wave_of_few_cases_has_up_to_eight_draws_of_each(bits_s: float, trials: set[int]) -> None:
    known = {f"case-{k}": Known(bits=10**8, judged=1, bits_s=bits_s) for k in range(20)}
    wave = _wave(0, known, place=Place(workers=12), seconds_left=3000.0)
    wanted = [each for _, steps in wave.processes for each in steps]
    found = Counter(each.case for each in set(wanted))
    assert {found[case] for case in known} == trials
    # an oracle judges a new draw each time
    judged = [each for _, steps in _wave(3, _CASES).processes for each in steps]
    assert set(Counter(each.case for each in judged).values()) == {1}


def test_draws_of_bits_come_back_in_other_nights_and_oracles_judge_a_new_one_each_time() -> None:
    known = {"case": Known(bits=40, judged=7, bits_s=0.1, judged_s=0.1)}

    def draws(number: int, seed: int) -> set[int]:
        wave = _wave(number, known, seed=seed)
        return {wanted.draw for _, steps in wave.processes for wanted in steps}

    nights = [draws(0, seed) for seed in range(20)]
    seen = Counter(draw for night in nights for draw in night)
    # a quarter of the trials so far, and those of the wave itself
    assert max(seen) < 40 // 4 + 8
    assert all(seen[draw] > 1 for draw in range(40 // 4))
    assert [draws(3, seed) for seed in range(3)] == [{7}] * 3


def test_waves_of_bits_leave_time_for_oracles_as_long_as_a_case_was_never_judged() -> None:
    known = {f"case-{k}": Known(bits=10**8, judged=k, bits_s=0.1) for k in range(20)}
    wave = _wave(0, known, place=Place(workers=12), seconds_left=3000.0)
    found = Counter(each.case for _, steps in wave.processes for each in set(steps))
    assert set(found.values()) == {3}


def _seconds_alone(known: dict[str, Known]) -> float:
    wave = _wave(2, known, place=Place(workers=4), seconds_left=2400.0)
    (_, steps), *_ = wave.processes
    return sum(known[each.case].seconds(each.measure) for each in steps)


def test_waves_alone_are_as_short_as_the_others_of_few_cases() -> None:
    def few(count: int, **takes: float) -> float:
        known = {f"case-{k}": Known(judged=1, **takes) for k in range(count)}  # type: ignore[arg-type]
        return _seconds_alone(known)

    # 120 s of each of the three other waves
    whole = few(40_000, bits_s=0.05, judged_s=1.0)
    # one draw of each is enough where the others wait
    assert whole == pytest.approx(360 * 0.0345, rel=0.05)
    # 120 s of one of them, and 20 s of the two with bits
    assert few(200, bits_s=0.05, judged_s=2.4) == pytest.approx(whole * 160 / 360, rel=0.05)
    # 60 s of one of them, and 20 s of the two with bits
    assert few(200, bits_s=0.05, judged_s=1.2) == pytest.approx(whole * 100 / 360, rel=0.05)


def test_waves_alone_of_cases_without_bits_are_as_long_as_those_of_others() -> None:
    engines = {f"engine-{k}": Known(has_bits=False, judged_s=1.0) for k in range(2000)}
    many = {f"case-{k}": Known(bits_s=0.05) for k in range(40_000)}
    assert _seconds_alone(engines) == pytest.approx(_seconds_alone(many), rel=0.1)


def test_a_short_wave_has_bits_of_cases_that_are_known_to_be_short() -> None:
    known = {
        "short": Known(bits=3, bits_s=SHORT_S),
        "other": Known(bits=1, bits_s=0.1),
        "long": Known(bits=3, bits_s=SHORT_S + 0.1),
        # in this scan it was not compiled yet
        "new": Known(bits=3, bits_s=0.1, traced=False),
        "engine": Known(bits=1, bits_s=0.1, has_bits=False),
        "large": Known(bits=3, bits_s=0.1, is_large=True),
    }
    place = Place(gpus=("0",), workers=2)
    for number in range(5):
        wave = short_wave(known, place, number=number, seed=1)
        assert wave is not None
        assert set.union(*_cases(wave)) == {"short", "other"}
        assert {wanted.measure for _, steps in wave.processes for wanted in steps} == {Measure.BITS}
        assert {conditions for conditions, _ in wave.processes} == {
            replace(PLAIN, gpu="0", neighbours=1)
        }
        assert not wave.is_alone
    assert short_wave({"new": Known(traced=False)}, place, number=0, seed=1) is None


def test_short_waves_have_other_cases_each_time() -> None:
    # what the last one has shown need not be known by then
    known = {f"case-{k}": Known(bits=k, bits_s=1.0) for k in range(200)}
    waves = [short_wave(known, Place(workers=2), number=number, seed=1) for number in (1, 1, 2)]
    assert waves[0] == waves[1]
    first, second = (set.union(*_cases(wave)) for wave in waves[1:] if wave is not None)
    assert len(first) == len(second) == 20
    assert len(first & second) < 10


def test_large_cases_take_no_longer_than_the_part_of_one_worker() -> None:
    known = {f"large-{k}": Known(bits_s=50.0, is_large=True) for k in range(20)}
    known |= {f"case-{k}": Known(bits_s=1.0, changed=False) for k in range(2000)}
    first, *others = _cases(_wave(0, known, place=Place(gpus=("0",), workers=4)))
    # a wave of 75 s, or a first one that takes longer
    assert sum(name.startswith("large") for name in first) == 1
    # although the large ones come first
    assert all(len(other) > 30 for other in others)


def test_a_large_case_that_is_the_only_one_runs_on_every_worker() -> None:
    known = {"single": Known(is_large=True)}
    for number in (0, 1):
        wave = _wave(number, known, previous=_wave(0, known), place=Place(gpus=("0",), workers=2))
        assert _cases(wave) == [{"single"}] * 2


def test_every_gpu_runs_the_same_trials() -> None:
    place = Place(gpus=("GPU-a", "GPU-b"), workers=2)
    for number in (0, 1):
        wave = _wave(number, previous=_wave(0, place=place), place=place)
        gpus = [conditions.gpu for conditions, _ in wave.processes]
        assert gpus == ["GPU-a"] * 2 + ["GPU-b"] * 2
        a, b, c, d = _cases(wave)
        assert a | b == c | d
    assert a == b
    assert {conditions.schedule for conditions, _ in wave.processes} == {Schedule.DELAYED}
    (alone, _), (other, _) = _wave(2, place=place).processes
    assert (alone, other) == (replace(PLAIN, gpu="GPU-a"), replace(PLAIN, gpu="GPU-b"))


def test_oracles_judge_cases_whose_path_is_known() -> None:
    known = {**_CASES, "new": Known(traced=False)}
    for number in (3, 7):
        steps = [w for _, steps in _wave(number, known).processes for w in steps]
        assert {w.measure for w in steps} == {Measure.JUDGED}
        assert {w.case for w in steps} <= set(_CASES)


def test_some_trials_run_with_nothing_beside_them_one_of_each_path_first() -> None:
    known = {f"{path}-{k}": Known(path=path, judged_s=3.0) for path in "abcd" for k in range(3)}
    known |= {f"often-{k}": Known(path="often", alone=5, judged_s=3.0) for k in range(9)}
    wave = _wave(2, known)
    ((conditions, steps),) = wave.processes
    assert (wave.is_alone, conditions) == (True, PLAIN)
    # in 4.5 s, as other waves take 30 s
    assert sorted(wanted.case.partition("-")[0] for wanted in steps) == ["a", "b", "c", "d"]
    measures = {w.measure for k in (2, 6) for _, own in _wave(k, known).processes for w in own}
    assert measures == set(Measure)


def test_workers_are_counted_on_every_gpu() -> None:
    assert Place(workers=3).slots == 3
    assert Place(gpus=("GPU-a", "GPU-b"), workers=2).slots == 4


def test_a_single_worker_is_always_alone_and_waits_for_nobody() -> None:
    waves = [_wave(number, previous=_wave(0), place=Place()) for number in range(8)]
    assert not any(wave.is_alone for wave in waves)
    assert {len(wave.processes) for wave in waves} == {1}
    assert {conditions.neighbours for wave in waves for conditions, _ in wave.processes} == {0}


def test_all_factors_are_varied_in_the_course_of_a_scan() -> None:
    gpu = {"place": Place(gpus=("GPU-a",), workers=2)}
    stressed = [_wave(4 * k + 1, previous=_wave(4 * k), **gpu) for k in range(1, 40)]
    seen = Counter(item for wave in stressed for item in wave.processes[0][0].varied().items())
    for item in (("memory", "zeros"), ("memory", "poison"), ("cache", "cold"), ("clock", "fast")):
        assert 0 < seen[item] < 39


def test_cases_with_the_fewest_trials_on_what_changed_come_first() -> None:
    known = {
        "decided": Known(changed=True, decided=True),
        "rare": Known(changed=True, bits=2),
        "often": Known(changed=True, bits=9),
        "old": Known(changed=False),
    }
    # each takes as long as a wave
    known = {name: replace(case, bits_s=100.0) for name, case in known.items()}
    order = []
    while known:
        ((_, (wanted,)),) = _wave(0, known, place=Place()).processes
        order.append(wanted.case)
        del known[wanted.case]
    assert order == ["rare", "often", "decided", "old"]


def test_every_case_is_judged_once_before_an_undecided_one_is_judged_again() -> None:
    known = {
        "undecided": Known(judged=1),
        "stable and judged": Known(judged=1, decided=True),
        "stable": Known(bits=9, decided=True),
        "new": Known(),
        "old": Known(changed=False),
    }
    # each takes as long as a wave
    known = {name: replace(case, judged_s=100.0) for name, case in known.items()}
    order = []
    while known:
        ((_, (wanted,)),) = _wave(2, known, place=Place()).processes
        assert wanted.measure is Measure.JUDGED
        order.append(wanted.case)
        del known[wanted.case]
    assert order == ["new", "stable", "undecided", "stable and judged", "old"]


def test_the_same_seed_gives_the_same_wave_and_another_one_another_order() -> None:
    assert _wave(0) == _wave(0)
    assert _wave(0) != _wave(0, seed=2)


def test_a_wave_fits_into_what_is_left() -> None:
    known = {f"case-{k}": Known(bits_s=1.0) for k in range(1000)}
    sizes = [len(_cases(_wave(0, known, seconds_left=left))[0]) for left in (20.0, 600.0, 36000.0)]
    # of each of two workers
    assert sizes == [10, 30, 120]


def test_what_is_known_of_a_case_comes_from_its_trials(trial: NewTrial) -> None:
    trials = [
        trial(0, case="a", duration_s=2.0),
        trial(1, case="a", measure="judged", duration_s=3.0, conditions={"neighbours": "1"}),
        trial(2, case="gone"),
    ]
    standing = Standing(["a", "b"], ())
    for each in trials:
        standing.add(glance_at(each))
    found = standing.known(changed=["b"], traced=["a"])
    assert found == {
        "a": Known(
            bits=1,
            judged=1,
            bits_s=2.0,
            judged_s=3.0,
            changed=False,
            decided=False,
            traced=True,
            path="dense_delta eager bf16",
            alone=1,
        ),
        "b": Known(changed=True, traced=False),
    }
    assert Standing(["a"], ()).known(changed=None, traced=[])["a"].changed


def test_cases_changed_are_those_whose_source_was_touched_or_is_unknown(
    tmp_path: Path, trial: NewTrial, scan_run: Callable[..., ScanRun]
) -> None:
    with open_history(tmp_path / "h.db") as history:
        history.add_run(scan_run())
        for key in ("k1", "k2", "k3"):
            history.add_path(PathFiles(path_key=key, files=("common.py", f"{key}.py")))
        keys = {"a": "k1", "b": "k2", "c": "unlisted"}
        for number, (case, key) in enumerate(keys.items()):
            history.add(trial(number, case=case, path_key=key))
        # traced again since
        history.add(trial(9, case="b", path_key="k3"))
        cases = ("a", "b", "c", "never")
        assert cases_changed(cases, history, {"k1.py"}) == {"a", "c", "never"}
        assert cases_changed(cases, history, {"k2.py"}) == {"c", "never"}
        assert cases_changed(cases, history, {"common.py"}) == set(cases)


@pytest.mark.parametrize("text", ["20", "0m", "2d", "m"])
def test_a_budget_that_is_no_time_is_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    from loragate.cli import main

    with pytest.raises(SystemExit) as ended:
        main(["scan", "--budget", text])
    assert ended.value.code == 4
    assert "must be a time as 90s, 20m or 2h" in capsys.readouterr().err


def test_files_changed_since_a_revision_are_those_of_git(tmp_path: Path) -> None:
    def git(*arguments: str) -> None:
        who = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
        subprocess.run(["git", "-C", str(tmp_path), *who, *arguments], check=True)

    git("init", "-q")
    for name in ("a.py", "b.py"):
        (tmp_path / name).write_text("1\n", encoding="utf-8")
    git("add", ".")
    git("commit", "-qm", "first")
    (tmp_path / "b.py").write_text("2\n", encoding="utf-8")
    assert changed_files(tmp_path, "HEAD") == {"b.py"}
    with pytest.raises(subprocess.SubprocessError):
        changed_files(tmp_path, "--output=x")
