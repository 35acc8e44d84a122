"""Where the next minute tells most. Pure: the same history and seed give the same plan.

A scan runs *waves*. A wave is one process, or several at the same time, of which each runs the same
trials in an order of its own. The cheap and strong measurement comes first: the same inputs twice
in one process, compared bit for bit, then again in other processes under everything that must not
matter at once. Oracles judge after that. Which factor it was is found out only where bits differ.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from loragate.history.model import TrialRecord
from loragate.nightly.conditions import PLAIN, Cache, Clock, Conditions, Memory, Schedule

# a case that nobody has timed
_UNTIMED_S = 1.0
# what a process costs before its first trial; a wave lasts several times as long
_SHORTEST_WAVE_S = 10.0
_LONGEST_WAVE_S = 120.0
# of the waves under stress, how many begin with an empty cache
_COLD = 0.125


class Measure(StrEnum):
    BITS = "bits"
    JUDGED = "judged"


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """A trial to be made: a case by its run id, and the draw of its data."""

    case: str
    draw: int
    measure: Measure

    @property
    def id(self) -> str:
        return f"{self.case}#{self.draw} ({self.measure})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Wave:
    """Processes that run at the same time; each has its conditions and its order of trials."""

    processes: tuple[tuple[Conditions, tuple[Wanted, ...]], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """What is known of a case: trials of either measure, how long each takes, and whether its path
    is still undecided. changed: since the revision that was asked for, or never seen. traced: it is
    known which source it runs."""

    bits: int = 0
    judged: int = 0
    bits_s: float = _UNTIMED_S
    judged_s: float = _UNTIMED_S
    changed: bool = True
    decided: bool = False
    traced: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a scan runs. workers: processes at the same time on each GPU, or on the CPU."""

    gpus: tuple[str, ...] = ()
    workers: int = 1

    @property
    def neighbours(self) -> int:
        return self.workers - 1


def known_cases(
    cases: Iterable[str],
    trials: Iterable[TrialRecord],
    *,
    changed: Collection[str] | None,
    undecided: Collection[str],
    traced: Collection[str],
) -> dict[str, Known]:
    """changed: the cases that a revision may have changed; None where no revision was named.
    undecided: cases of undecided paths. A case without trials counts as both. traced: cases whose
    path is known."""
    found = {
        case: Known(changed=changed is None or case in changed, traced=case in traced)
        for case in cases
    }
    for trial in trials:
        known = found.get(trial.case)
        if known is None:
            continue
        known = replace(known, decided=trial.case not in undecided)
        if trial.measure == Measure.BITS:
            known = replace(known, bits=known.bits + 1, bits_s=trial.duration_s)
        else:
            known = replace(known, judged=known.judged + 1, judged_s=trial.duration_s)
        found[trial.case] = known
    return found


def next_wave(
    known: Mapping[str, Known],
    place: Place,
    *,
    number: int,
    seed: int,
    seconds_left: float,
    previous: Wave | None = None,
) -> Wave:
    """Wave `number` of a scan. The kinds of waves take turns: bits alone, the same bits under
    stress, judged alone or beside neighbours. previous: the wave before this one."""
    rng = random.Random(f"{seed}/{number}")
    kind = number % 3
    if kind == 1 and previous is not None:
        stress = _stress(rng, everything=number == 1, place=place)
        return _spread(previous.processes[0][1], (stress,) * place.workers, place, rng)
    measure = Measure.JUDGED if kind == 2 else Measure.BITS
    length = min(_LONGEST_WAVE_S, max(_SHORTEST_WAVE_S, seconds_left / 20))
    chosen = _chosen(known, measure, length, rng)
    if measure is Measure.JUDGED and (number // 3) % 2:
        beside = replace(PLAIN, neighbours=place.neighbours)
        return _spread(chosen, (beside,) * place.workers, place, rng)
    return _spread(chosen, (PLAIN,), place, rng)


def _chosen(
    known: Mapping[str, Known], measure: Measure, length: float, rng: random.Random
) -> tuple[Wanted, ...]:
    """Cases with the fewest trials first, as many as fit; at least one. The bits of a case come
    before its oracles, because they trace its path."""
    order = sorted(known)
    if measure is Measure.JUDGED:
        order = [case for case in order if known[case].traced] or order
    rng.shuffle(order)
    order.sort(key=lambda case: _worth(known[case], measure))
    chosen: list[Wanted] = []
    spent = 0.0
    for case in order:
        have = known[case]
        spent += have.bits_s if measure is Measure.BITS else have.judged_s
        if chosen and spent > length:
            break
        # bits are compared with those of earlier nights, so that draws come back
        draw = rng.randrange(have.bits // 4 + 1) if measure is Measure.BITS else have.judged
        chosen.append(Wanted(case=case, draw=draw, measure=measure))
    return tuple(chosen)


def _worth(known: Known, measure: Measure) -> tuple[bool, bool, int]:
    trials = known.bits if measure is Measure.BITS else known.judged
    return not known.changed, known.decided, trials


def _stress(rng: random.Random, *, everything: bool, place: Place) -> Conditions:
    """What must not matter, in a combination; the first time everything at once, but for the
    compile cache: compiling all kernels again takes most of the time of a wave."""

    def maybe() -> bool:
        return everything or rng.random() < 0.5

    return Conditions(
        memory=Memory.POISON if maybe() else Memory.ZEROS,
        cache=Cache.COLD if place.gpus and rng.random() < _COLD else Cache.WARM,
        clock=rng.choice((Clock.FAST, Clock.FROZEN)) if maybe() else Clock.PLAIN,
        schedule=Schedule.DELAYED if place.gpus and maybe() else Schedule.PLAIN,
        neighbours=place.neighbours,
    )


def _spread(
    chosen: Sequence[Wanted],
    conditions: Sequence[Conditions],
    place: Place,
    rng: random.Random,
) -> Wave:
    """The same trials on every GPU, in another order in each process."""
    return Wave(
        processes=tuple(
            (replace(each, gpu=gpu), tuple(rng.sample(chosen, len(chosen))))
            for gpu in place.gpus or ("",)
            for each in conditions
        )
    )
