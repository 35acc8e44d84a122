"""What would run, and what would not and why. Pure: the same arguments give the same plan.

Tiers nest: a run of a tier includes the cases of that tier and of every lower one, so nightly
contains premerge and premerge contains smoke. Smoke cases are small enough for the interpreter;
the others need a GPU, and without one each of them is skipped with that reason.
Every selected case of every subject is either planned or skipped, never silently absent.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from loragate.core.machine import Machine
from loragate.core.plural import counted
from loragate.matrix.case import Case, Site, Tier
from loragate.matrix.case_run import CaseRun
from loragate.matrix.footprint import footprint_bytes
from loragate.matrix.ids import run_id
from loragate.matrix.patterns import SelectionError, selected_ids

_TIERS = (Tier.SMOKE, Tier.PREMERGE, Tier.NIGHTLY)
_GIB = 1 << 30
# each process of a run holds a list of all of them
_MOST_RUNS = 5_000_000


@dataclass(frozen=True, slots=True)
class Candidate:
    """A subject as the planner sees it: a name, and the reason why it cannot run a case."""

    name: str
    refuses: Callable[[Case], str | None]


@dataclass(frozen=True, slots=True)
class Skipped:
    """A case that is not run, with the reason; it stands for all draws and repeats."""

    subject: str
    case: Case
    run_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class Plan:
    """`planned` is sorted by run id, draw and repeat; `skipped` is sorted by run id. `once` are the
    cases of `planned` that are run with the first of the draws alone."""

    tier: Tier
    machine: Machine
    planned: tuple[CaseRun, ...]
    skipped: tuple[Skipped, ...]
    once: frozenset[str] = frozenset()

    @property
    def run_ids(self) -> frozenset[str]:
        """Of all cases, planned or skipped."""
        return frozenset(item.run_id for items in (self.planned, self.skipped) for item in items)

    @property
    def digest(self) -> str:
        """Changes with how any case is judged, which its id does not say: oracles and deadline."""
        cases = {item.run_id: item.case for items in (self.planned, self.skipped) for item in items}
        judged = [
            (name, sorted(case.oracles), case.timeout_s) for name, case in sorted(cases.items())
        ]
        return hashlib.sha256(repr(judged).encode()).hexdigest()[:12]

    def of(self, run_ids: Collection[str]) -> Plan:
        """The part of the plan that is about these cases."""
        return replace(
            self,
            planned=tuple(run for run in self.planned if run.run_id in run_ids),
            skipped=tuple(skip for skip in self.skipped if skip.run_id in run_ids),
            once=self.once.intersection(run_ids),
        )

    @property
    def expected(self) -> dict[tuple[str, Site], tuple[str, ...]]:
        """Run ids that have to be executed, by subject and site; each once, whatever its draws."""
        names: dict[tuple[str, Site], dict[str, None]] = {}
        for run in self.planned:
            names.setdefault((run.subject, run.case.site), {})[run.run_id] = None
        return {key: tuple(names[key]) for key in sorted(names)}


def plan(
    cases: Sequence[Case],
    subjects: Sequence[Candidate],
    tier: Tier,
    machine: Machine,
    *,
    draws: Sequence[int] = (0,),
    repeats: int = 1,
    patterns: Sequence[str] = (),
    once: Callable[[str], bool] = lambda run_id: False,
) -> Plan:
    """Plan `repeats` runs of each of `draws` of the cases of a tier, for every subject.

    `patterns` select run ids, see `loragate.matrix.patterns`; a case is selected by any of them.
    `once` says of a run id that it is run with the first of the draws alone.
    Raises SelectionError if one of them selects nothing, or for too many runs.
    """
    named = {run_id(s.name, case): (s, case) for s in _by_name(subjects) for case in cases}
    wanted = select_names({name: case for name, (_, case) in named.items()}, tier, patterns)
    check_number(len(wanted), len(draws), repeats)
    planned: list[CaseRun] = []
    skipped: list[Skipped] = []
    for name in wanted:
        subject, case = named[name]
        reason = beyond_machine(case, machine) or subject.refuses(case)
        if reason is not None:
            skipped.append(Skipped(subject.name, case, name, reason))
            continue
        planned += [
            CaseRun(subject.name, case, draw, repeat)
            for draw, repeat in trials(draws, repeats, once=once(name))
        ]
    of_one = frozenset(run.run_id for run in planned if once(run.run_id))
    return Plan(tier, machine, tuple(planned), tuple(skipped), of_one)


def trials(draws: Iterable[int], repeats: int, *, once: bool) -> list[tuple[int, int]]:
    """Draw and repeat of all trials of a case, or of the first one alone."""
    all_trials = [(draw, repeat) for draw in sorted(set(draws)) for repeat in range(repeats)]
    return all_trials[:1] if once else all_trials


def select_names(named: Mapping[str, Case], tier: Tier, patterns: Sequence[str]) -> tuple[str, ...]:
    """The run ids of `named` that a run of `tier` selects, sorted.

    Raises SelectionError if a pattern selects nothing.
    """
    within = tiers_within(tier)
    beyond = {name: case.tier.value for name, case in named.items() if case.tier not in within}
    return tuple(sorted(selected_ids(patterns, named.keys() - beyond.keys(), beyond=beyond)))


def check_number(cases: int, draws: int, repeats: int) -> None:
    """Raises SelectionError for more runs than a process can list."""
    if cases * draws * repeats > _MOST_RUNS:
        raise SelectionError(
            f"{counted(cases, 'case')} with {counted(draws, 'draw')} and "
            f"{counted(repeats, 'repeat')} are {cases * draws * repeats} runs; allowed are "
            f"{_MOST_RUNS}, so select fewer cases, draws or repeats"
        )


def tiers_within(tier: Tier) -> frozenset[Tier]:
    """The tiers whose cases a run of `tier` includes."""
    return frozenset(_TIERS[: _TIERS.index(tier) + 1])


def beyond_machine(case: Case, machine: Machine) -> str | None:
    """The reason why no subject can run a case on this machine, or None."""
    if machine.interpreted:
        if case.tier is Tier.SMOKE:
            return None
        return f"tier {case.tier} needs a GPU: its shapes are beyond the interpreter"
    need = footprint_bytes(case)
    if machine.memory_bytes and need > machine.memory_bytes:
        have = machine.memory_bytes / _GIB
        return f"needs about {need / _GIB:.0f} GiB of device memory, there are {have:.0f}"
    return None


def _by_name(subjects: Sequence[Candidate]) -> list[Candidate]:
    named = {subject.name: subject for subject in subjects}
    assert len(named) == len(subjects), "two subjects of one name"
    return list(named.values())
