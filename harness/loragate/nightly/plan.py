"""Where the next minute tells most. Pure: the same history and seed give the same plan.

A scan runs *waves*. A wave has a process for each worker: one after the other of a worker runs the
trials that its waves have for it. The cheap and strong measurement comes first: the same inputs
twice in one process, compared bit for bit, then again in other processes under everything that must
not matter at once. Oracles judge after that. Now and then some trials run with nothing beside them.
Which factor it was is found out only where bits differ.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import TypeAlias

from loragate.nightly.conditions import PLAIN, Cache, Clock, Conditions, Memory, Schedule
from loragate.nightly.wave import Known, Measure, Place, Wanted, Wave

# what a process costs before its first trial; a wave lasts several times as long
_SHORTEST_WAVE_S = 10.0
# there it initialises CUDA, and may have to import its subject, which takes seconds
_SHORTEST_WAVE_ON_A_GPU_S = 75.0
_LONGEST_WAVE_S = 120.0
# of the waves under stress, how many begin with an empty cache
_COLD = 0.125
# of the time of all workers, what those that wait for a wave alone may lose
_WAITING = 0.025
# trials of bits are short: so many of each case, where a wave would end early without
_DRAWS = 8
# as long as a case was never judged, which waves of many draws would leave less time for
_FIRST_DRAWS = 3
# the longest trial that others may have to wait for before a wave alone
SHORT_S = 2.0


class _Kind(Enum):
    BITS = auto()
    STRESS = auto()
    ALONE = auto()
    JUDGED = auto()


def next_wave(
    known: Mapping[str, Known],
    place: Place,
    *,
    number: int,
    seed: int,
    seconds_left: float,
    previous: Wave | None = None,
) -> Wave:
    """Wave `number` of a scan. The kinds of waves take turns: bits, the same bits under stress,
    alone where there are workers beside each other, judged. previous: the wave before this one."""
    rng = random.Random(f"{seed}/{number}")
    # all wait for the last trial before a wave alone; trials of bits are short
    kinds = [kind for kind in _Kind if kind is not _Kind.ALONE or place.neighbours]
    cycle, turn = divmod(number, len(kinds))
    kind = kinds[turn]
    if kind is _Kind.STRESS and previous is not None:
        stress = _stress(rng, everything=number == 1, place=place)
        return _repeated(_split(previous.processes[0][1], known), stress, place, rng)
    length = _length(seconds_left, place)
    is_judged = kind is _Kind.JUDGED or (kind is _Kind.ALONE and cycle % 2 == 1)
    measure = Measure.BITS
    if is_judged or not any(case.has_bits for case in known.values()):
        measure = Measure.JUDGED
    if kind is _Kind.ALONE:
        length = _part_alone(place) * _cycle(known, length, place)
        chosen = _chosen(known, measure, length, rng, first=_by_path, longest=length, draws=1)
        return _alone(_split(chosen, known), place, rng)
    whole = length * place.workers
    draws = _draws(known)
    chosen = _chosen(known, measure, whole, rng, first=_by_trials, large_s=length, draws=draws)
    conditions = replace(PLAIN, neighbours=place.neighbours)
    return _dealt(_split(chosen, known), conditions, place, rng)


def short_wave(known: Mapping[str, Known], place: Place, *, number: int, seed: int) -> Wave | None:
    """What workers do while another one ends a long trial ahead of a wave alone: bits of cases that
    took no time in this scan, whose kernels are compiled. None where there are none. `number` is
    that of a call: what the last one showed need not be known yet."""
    short = {
        name: case
        for name, case in known.items()
        if case.has_bits and case.traced and case.bits_s <= SHORT_S and not case.is_large
    }
    if not short:
        return None
    rng = random.Random(f"{seed}/short/{number}")
    whole = _SHORTEST_WAVE_S * place.workers
    chosen = _chosen(short, Measure.BITS, whole, rng, first=_by_chance)
    conditions = replace(PLAIN, neighbours=place.neighbours)
    return _dealt(_split(chosen, short), conditions, place, rng)


def _draws(known: Mapping[str, Known]) -> int:
    """The most draws of a case in a wave of bits."""
    return _DRAWS if all(case.judged for case in known.values()) else _FIRST_DRAWS


def _part_alone(place: Place) -> float:
    """How long a wave alone is, as a part of the three others."""
    lost = _WAITING * place.slots / (place.slots - len(place.gpus or ("",)))
    return lost / (1 - lost)


def _cycle(known: Mapping[str, Known], length: float, place: Place) -> float:
    """What the three others last together: few cases have too few trials for a whole wave."""
    judged = min(length, sum(case.judged_s for case in known.values()) / place.workers)
    with_bits = [case.bits_s for case in known.values() if case.has_bits]
    trials_s = _draws(known) * sum(with_bits)
    bits = min(length, trials_s / place.workers) if with_bits else judged
    return judged + 2 * bits


def _length(seconds_left: float, place: Place) -> float:
    """Of a wave: many in a scan, and each many times as long as the start of a process."""
    shortest = _SHORTEST_WAVE_S
    if place.gpus:
        shortest = max(shortest, min(_SHORTEST_WAVE_ON_A_GPU_S, seconds_left / 6))
    return min(_LONGEST_WAVE_S, max(shortest, seconds_left / 20))


_First: TypeAlias = Callable[[Sequence[str], Mapping[str, Known], Measure], list[str]]


def _chosen(
    known: Mapping[str, Known],
    measure: Measure,
    length: float,
    rng: random.Random,
    first: _First,
    longest: float = math.inf,
    large_s: float = math.inf,
    draws: int = _DRAWS,
) -> tuple[Wanted, ...]:
    """As many trials as fit into `length`, of cases in the order of `first`, each of at most
    `longest` if there are such; at least one. large_s: for large cases, which one worker has, all
    together. draws: the most of bits of a case."""
    order = _suitable(known, measure)
    # the others wait for the whole of a long case
    order = [case for case in order if known[case].seconds(measure) <= longest] or order
    rng.shuffle(order)
    chosen: dict[Wanted, None] = {}
    spent = spent_on_large = 0.0
    in_order = first(order, known, measure)
    draws = draws if measure is Measure.BITS else 1
    for turn, case in ((turn, case) for turn in range(draws) for case in in_order):
        have = known[case]
        wanted = Wanted(case=case, draw=_draw(have, measure, turn, rng), measure=measure)
        if wanted in chosen:
            continue
        if have.is_large:
            spent_on_large += have.seconds(measure)
            if chosen and spent_on_large > large_s:
                continue
        spent += have.seconds(measure)
        if chosen and spent > length:
            break
        chosen[wanted] = None
    return tuple(chosen)


def _draw(have: Known, measure: Measure, turn: int, rng: random.Random) -> int:
    """That of the trial which has the number `turn` among those of its case within a wave."""
    if measure is Measure.JUDGED:
        return have.judged
    # bits are compared with those of earlier nights, so that draws come back
    return rng.randrange(have.bits // 4 + 1 + turn)


def _suitable(known: Mapping[str, Known], measure: Measure) -> list[str]:
    """The bits of a case come before its oracles, because they trace its path."""
    if measure is Measure.BITS:
        return sorted(name for name, case in known.items() if case.has_bits)
    return sorted(
        name for name, case in known.items() if case.traced or not case.has_bits
    ) or sorted(known)


def _by_trials(cases: Sequence[str], known: Mapping[str, Known], measure: Measure) -> list[str]:
    """Those with the fewest trials first. What no oracle has judged may be wrong with the same bits
    every time, so that it is judged once although its path is decided."""

    def worth(case: str) -> tuple[bool, bool, bool, int]:
        have = known[case]
        trials = have.bits if measure is Measure.BITS else have.judged
        is_known = measure is Measure.BITS or have.judged > 0
        return not have.changed, is_known, have.decided, trials

    return sorted(cases, key=worth)


def _by_chance(cases: Sequence[str], known: Mapping[str, Known], measure: Measure) -> list[str]:
    """In the order in which they are given, which is drawn."""
    return list(cases)


def _by_path(cases: Sequence[str], known: Mapping[str, Known], measure: Measure) -> list[str]:
    """One of each path, first of those that were alone the fewest times."""
    turn: dict[str, int] = {}
    seen: Counter[str] = Counter()
    for case in cases:
        have = known[case]
        turn[case] = have.alone + seen[have.path]
        seen[have.path] += 1
    return sorted(cases, key=turn.__getitem__)


def _stress(rng: random.Random, *, everything: bool, place: Place) -> Conditions:
    """What must not matter, in a combination; the first time everything at once, but for the
    compile cache: compiling all kernels again takes most of the time of a wave."""

    def maybe() -> bool:
        return everything or rng.random() < 0.5

    return Conditions(
        memory=Memory.POISON if maybe() else Memory.ZEROS,
        cache=Cache.COLD if place.gpus and rng.random() < _COLD else Cache.WARM,
        clock=rng.choice((Clock.FAST, Clock.SLOW)) if maybe() else Clock.PLAIN,
        schedule=Schedule.DELAYED if place.gpus and maybe() else Schedule.PLAIN,
        neighbours=place.neighbours,
    )


@dataclass(frozen=True, slots=True)
class _Split:
    """The trials of a wave. The first worker of each GPU has all `large` ones: another one would
    wait for the memory that the first one uses."""

    large: tuple[Wanted, ...]
    others: tuple[Wanted, ...]


def _split(wanted: Sequence[Wanted], known: Mapping[str, Known]) -> _Split:
    large = tuple(each for each in wanted if known[each.case].is_large)
    return _Split(large, tuple(each for each in wanted if each not in large))


def _dealt(chosen: _Split, conditions: Conditions, place: Place, rng: random.Random) -> Wave:
    """The same trials on every GPU, divided among its workers; no worker is left without one."""
    processes = []
    for gpu in place.gpus or ("",):
        order = rng.sample(chosen.others, len(chosen.others))
        spare = order or chosen.large
        for worker in range(place.workers):
            own = order[worker :: place.workers]
            if worker == 0:
                own = rng.sample((*own, *chosen.large), len(own) + len(chosen.large))
            own = own or [spare[worker % len(spare)]]
            processes.append((replace(conditions, gpu=gpu), tuple(own)))
    return Wave(processes=tuple(processes))


def _repeated(wanted: _Split, conditions: Conditions, place: Place, rng: random.Random) -> Wave:
    """The same trials by every worker of every GPU, in another order by each."""
    processes = []
    for gpu in place.gpus or ("",):
        for worker in range(place.workers):
            has_large = worker == 0 or not wanted.others
            own = (*wanted.others, *(wanted.large if has_large else ()))
            processes.append((replace(conditions, gpu=gpu), tuple(rng.sample(own, len(own)))))
    return Wave(processes=tuple(processes))


def _alone(wanted: _Split, place: Place, rng: random.Random) -> Wave:
    """The same trials by one process on every GPU."""
    single = _repeated(wanted, PLAIN, replace(place, workers=1), rng)
    return replace(single, is_alone=True)
