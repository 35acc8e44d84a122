"""What a result depends on, from trials that are made up: the logic without processes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import chain, cycle, repeat
from math import comb
from random import Random

import pytest

from loragate.history import TrialRecord
from loragate.nightly.conditions import (
    PLAIN,
    Cache,
    Cause,
    Clock,
    Conditions,
    Memory,
    Schedule,
    conditions_of,
)
from loragate.nightly.diagnosis import diagnose
from loragate.nightly.replays import replay_of_diagnosis
from loragate.nightly.suspects import (
    ALONE,
    LOOKS,
    Cell,
    Sighting,
    Suspect,
    TimeSpentError,
    is_more_often,
)

Shows = Callable[[Cell], str]


class _Lab:
    """Trials whose signature is a function of their cell."""

    def __init__(self, shows: Shows) -> None:
        self._shows = shows
        self.cells: list[Cell] = []

    def __call__(self, cell: Cell, count: int) -> Sequence[str]:
        self.cells.append(cell)
        return [self._shows(cell) for _ in range(count)]


def _unheld(cell: Cell) -> Conditions:
    """The conditions of a cell as they are without zeros in fresh memory."""
    is_held = cell.conditions.memory is Memory.ZEROS
    return replace(cell.conditions, memory=Memory.PLAIN) if is_held else cell.conditions


def _suspect(seen: Conditions = PLAIN, *, before: tuple[str, ...] = (), **more: object) -> Suspect:
    sightings = (
        Sighting(signature="good"),
        Sighting(signature="odd", conditions=seen, before=before),
    )
    return Suspect(sightings=sightings, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("varied", "cause"),
    [
        ({"memory": Memory.POISON}, Cause.MEMORY),
        ({"neighbours": 1}, Cause.NEIGHBOUR),
        ({"clock": Clock.FAST}, Cause.CLOCK),
        ({"clock": Clock.SLOW}, Cause.CLOCK),
    ],
)
def test_the_one_factor_that_changes_a_constant_result_is_named(
    varied: dict[str, object], cause: Cause
) -> None:
    culprit = replace(PLAIN, **varied)  # type: ignore[arg-type]
    stressed = Conditions(memory=Memory.POISON, cache=Cache.COLD, clock=Clock.FAST, neighbours=1)
    lab = _Lab(lambda cell: "odd" if culprit in (cell.conditions, _unheld(cell)) else "good")
    found = diagnose(_suspect(stressed), lab)
    assert found.cause is cause
    assert found.cell == Cell(conditions=culprit)
    # one factor at a time, but for memory that is held
    assert all(len(_unheld(cell).varied()) <= 1 for cell in lab.cells)


@pytest.mark.parametrize("chance", [1, 3, 4])
@pytest.mark.parametrize(
    "culprit", [replace(PLAIN, neighbours=1), replace(PLAIN, clock=Clock.FAST)]
)
def test_a_factor_is_not_blamed_for_what_fresh_memory_holds_under_it(
    culprit: Conditions, chance: int
) -> None:
    turns = cycle(["odd", *["good"] * (chance - 1)])
    lab = _Lab(lambda cell: next(turns) if cell.conditions == culprit else "good")
    found = diagnose(_suspect(culprit), lab)
    assert found.cause is Cause.MEMORY
    assert "never if fresh memory holds zeros" in found.explanation
    # no replay shows it but under the factor
    assert found.cell == Cell(conditions=culprit)


def test_a_rare_effect_of_a_factor_is_waited_for_before_memory_is_blamed() -> None:
    beside = replace(PLAIN, neighbours=1)
    turns = cycle(["odd", *["good"] * 4])
    lab = _Lab(lambda cell: next(turns) if _unheld(cell) == beside else "good")
    assert diagnose(_suspect(beside), lab).cause is Cause.NEIGHBOUR


def test_streams_caches_and_other_gpus_are_tried_where_there_are_any() -> None:
    home = replace(PLAIN, gpu="0")
    late = replace(home, schedule=Schedule.DELAYED)
    cold = replace(home, cache=Cache.COLD)
    other = replace(PLAIN, gpu="1")
    for culprit, cause in ((late, Cause.SCHEDULE), (cold, Cause.CACHE), (other, Cause.MACHINE)):
        sightings = (Sighting(signature="good", conditions=home), Sighting(signature="odd"))
        suspect = Suspect(sightings=sightings, gpus=("0", "1"))
        lab = _Lab(lambda cell, culprit=culprit: "odd" if _unheld(cell) == culprit else "good")
        assert diagnose(suspect, lab).cause is cause


@pytest.mark.parametrize(
    ("held", "cause"),
    [({"memory": Memory.ZEROS}, Cause.MEMORY), ({"clock": Clock.SLOW}, Cause.CLOCK)],
)
def test_the_one_factor_that_makes_a_changing_result_constant_is_named(
    held: dict[str, object], cause: Cause
) -> None:
    still, turns = replace(PLAIN, **held), cycle(["good", "odd"])  # type: ignore[arg-type]
    lab = _Lab(lambda cell: "good" if cell.conditions == still else next(turns))
    found = diagnose(_suspect(), lab)
    # of 8 too few change
    assert (found.cause, found.changed, found.tried) == (cause, 10, 20)


@pytest.mark.parametrize("held", [{"memory": Memory.ZEROS}, {"clock": Clock.SLOW}])
def test_a_result_is_not_constant_where_the_machine_failed_in_most_trials(
    held: dict[str, object],
) -> None:
    still, turns = replace(PLAIN, **held), cycle(["good", "odd"])  # type: ignore[arg-type]

    def failing(cell: Cell, count: int) -> Sequence[str]:
        return ["good"] if cell.conditions == still else [next(turns) for _ in range(count)]

    assert diagnose(_suspect(), failing).cause is Cause.RUN_TO_RUN


def test_a_result_that_changes_whatever_is_held_changes_from_run_to_run() -> None:
    turns = cycle(["good", "good", "good", "good", "odd"])
    found = diagnose(_suspect(), _Lab(lambda cell: next(turns)))
    assert found.cause is Cause.RUN_TO_RUN


def test_a_result_that_becomes_another_one_for_good_has_a_rate_and_a_replay(
    trial: Callable[..., TrialRecord],
) -> None:
    # as a file that processes leave behind may do it
    shown = chain(repeat("good", ALONE), repeat("odd"))
    found = diagnose(_suspect(), _Lab(lambda cell: next(shown)))
    assert found.cause is Cause.RUN_TO_RUN
    assert 0 < found.changed < found.tried
    assert " --times " in replay_of_diagnosis(found, trial(0))


def test_a_rare_change_is_not_taken_for_constant_after_a_few_trials() -> None:
    # one of six is seen; after six trials more the chance to see none is a third
    turns = cycle(["odd", *["good"] * 12])
    found = diagnose(_suspect(), _Lab(lambda cell: next(turns)))
    assert found.cause is Cause.RUN_TO_RUN


_STRESSED = Conditions(memory=Memory.POISON, clock=Clock.FAST, neighbours=1)


@pytest.mark.parametrize("rate", [0.1, 0.2, 0.3])
@pytest.mark.parametrize("seen", [PLAIN, _STRESSED])
def test_a_flake_that_nothing_changes_is_hardly_ever_blamed_on_anything(
    rate: float, seen: Conditions
) -> None:
    causes: Counter[Cause] = Counter()
    for seed in range(200):
        random = Random(seed)

        def flake(cell: Cell, random: Random = random) -> str:
            return "odd" if random.random() < rate else "good"

        causes[diagnose(_suspect(seen, before=("a", "b")), _Lab(flake)).cause] += 1
    known = causes[Cause.RUN_TO_RUN] + causes[Cause.UNKNOWN]
    assert sum(causes.values()) - known <= 0.05 * 200
    assert causes[Cause.RUN_TO_RUN] >= 0.9 * 200


@pytest.mark.parametrize("comparisons", [1, 4, 8])
def test_all_looks_of_all_comparisons_of_a_diagnosis_share_an_error_of_one_percent(
    comparisons: int,
) -> None:
    def error_of(look: int) -> float:
        """The chance that the fewest changes that count all fall into one half of equal trials."""
        fewest = next(
            changed
            for changed in range(look + 1)
            if is_more_often(changed, look, plain=look, comparisons=comparisons)
        )
        return comb(look, fewest) / comb(2 * look, fewest)

    assert comparisons * sum(map(error_of, LOOKS)) <= 0.01


def test_a_change_that_may_be_chance_is_told_and_blamed_on_nothing() -> None:
    poisoned = replace(PLAIN, memory=Memory.POISON)
    turns = cycle(["odd", *["good"] * 15])
    lab = _Lab(lambda cell: next(turns) if cell.conditions == poisoned else "good")
    found = diagnose(_suspect(poisoned), lab)
    assert found.cause is Cause.UNKNOWN
    assert "it changed while fresh memory holds NaN" in found.explanation
    assert "too rarely to tell that from chance" in found.explanation


def test_what_changes_rarely_alone_is_compared_with_the_opposite_of_what_ends_it() -> None:
    # what fresh memory holds by chance is nearly always the same
    turns = cycle(["odd", *["good"] * 9])

    def shows(cell: Cell) -> str:
        memory = cell.conditions.memory
        return next(turns) if memory is Memory.PLAIN else f"{memory}".replace("zeros", "good")

    found = diagnose(_suspect(), _Lab(shows))
    assert (found.cause, found.changed, found.tried) == (Cause.MEMORY, 8, 8)
    assert found.cell == Cell(conditions=replace(PLAIN, memory=Memory.POISON))


def test_a_flake_that_is_too_rare_to_tell_what_ends_it_says_so() -> None:
    turns = cycle(["odd", *["good"] * 9])
    still = replace(PLAIN, memory=Memory.ZEROS)
    lab = _Lab(lambda cell: "good" if cell.conditions == still else next(turns))
    found = diagnose(_suspect(), lab)
    assert (found.cause, found.tried) == (Cause.RUN_TO_RUN, 66)
    assert 6 <= found.changed <= 8
    assert "too rarely to tell whether it does while fresh memory holds zeros" in found.explanation


def test_a_rare_change_is_waited_for_where_it_was_seen() -> None:
    poisoned = replace(PLAIN, memory=Memory.POISON)
    turns = chain(["good"] * 13, repeat("odd"))
    lab = _Lab(lambda cell: next(turns) if cell.conditions == poisoned else "good")
    found = diagnose(_suspect(replace(poisoned, cache=Cache.COLD)), lab)
    assert (found.cause, found.tried) == (Cause.MEMORY, 8)


@pytest.mark.parametrize("polluter", range(7))
def test_the_one_trial_that_pollutes_is_found_by_halves(polluter: int) -> None:
    before = tuple("abcdefg")
    lab = _Lab(lambda cell: "odd" if before[polluter] in cell.before else "good")
    found = diagnose(_suspect(before=before), lab)
    assert (found.cause, found.polluter) == (Cause.ORDER, before[polluter])
    assert found.cell == Cell(conditions=PLAIN, before=(before[polluter],))
    # alone, poisoned, all of them, at most two for each time the number is halved, and to be sure
    assert len(lab.cells) <= 1 + 4 + 1 + 2 * 3 + 1


def test_a_trial_is_not_blamed_for_what_changes_by_chance_after_it() -> None:
    turns = cycle(["odd", "good", "good"])
    lab = _Lab(lambda cell: next(turns) if cell.before else "good")
    assert diagnose(_suspect(before=("a",)), lab).cause is Cause.UNKNOWN


def test_memory_that_others_left_behind_is_no_order() -> None:
    def shows(cell: Cell) -> str:
        # the allocator gives what earlier trials have written
        return "odd" if cell.before or cell.conditions.memory is Memory.POISON else "good"

    assert diagnose(_suspect(before=("a", "b")), _Lab(shows)).cause is Cause.MEMORY


def test_two_trials_that_only_pollute_together_are_both_kept() -> None:
    lab = _Lab(lambda cell: "odd" if {"a", "d"} <= set(cell.before) else "good")
    found = diagnose(_suspect(before=("a", "b", "c", "d")), lab)
    assert found.cause is Cause.ORDER
    assert found.cell is not None
    assert found.cell.before == ("a", "b", "c", "d")


def test_a_result_that_is_always_wrong_depends_on_nothing() -> None:
    suspect = _suspect(wrong=frozenset({"odd"}))
    found = diagnose(suspect, _Lab(lambda cell: "odd"))
    assert (found.cause, found.tried) == (Cause.ALWAYS, 6)


def test_the_odd_trial_is_the_one_that_differs_from_a_fresh_process() -> None:
    # most trials of the scan were polluted, so that the right one is the rare one
    sightings = tuple(Sighting(signature="odd", before=("polluter", "x")) for _ in range(3))
    suspect = Suspect(sightings=(Sighting(signature="good"), *sightings))
    lab = _Lab(lambda cell: "odd" if "polluter" in cell.before else "good")
    assert diagnose(suspect, lab).polluter == "polluter"


def test_what_needs_several_factors_at_once_is_tried_as_it_was_seen() -> None:
    seen = Conditions(memory=Memory.POISON, clock=Clock.FAST, neighbours=3)
    lab = _Lab(lambda cell: "odd" if (cell.conditions, cell.before) == (seen, ("a",)) else "good")
    found = diagnose(_suspect(seen, before=("a",)), lab)
    assert (found.cause, found.changed) == (Cause.COMBINATION, found.tried)
    assert found.cell == Cell(conditions=seen, before=("a",))


def test_what_does_not_show_again_is_unknown() -> None:
    found = diagnose(_suspect(before=("a",)), _Lab(lambda cell: "good"))
    assert found.cause is Cause.UNKNOWN
    # alone, poisoned, after the trial before it, and each of four factors
    assert found.tried == 6 + 4 * 4 + 1 + 4 * 4


@pytest.mark.parametrize("after", range(4))
def test_a_diagnosis_that_is_cut_short_names_nothing(after: int) -> None:
    turns: Iterator[str] = cycle(["good", "odd"])
    calls = 0

    def try_cell(cell: Cell, count: int) -> Sequence[str]:
        nonlocal calls
        calls += 1
        if calls > after:
            raise TimeSpentError
        return [next(turns) for _ in range(count)]

    found = diagnose(_suspect(), try_cell)
    assert found.cause is (Cause.RUN_TO_RUN if after == 3 else Cause.UNKNOWN)


def test_conditions_are_read_again_as_they_were_recorded() -> None:
    conditions = Conditions(memory=Memory.ZEROS, neighbours=3, gpu="GPU-1")
    assert conditions.varied() == {"memory": "zeros", "neighbours": "3", "gpu": "GPU-1"}
    assert conditions_of(conditions.varied()) == conditions
    assert PLAIN.varied() == {}
