"""What would run, and what would not and why. Pure: the same arguments give the same plan.

Tiers nest: a run of a tier takes the cases of that tier and of every lower one, so nightly
contains premerge and premerge contains smoke. Smoke cases are small enough for the interpreter;
the others need a GPU, and without one each of them is a skip with that reason.
Every selected case of every subject is either planned or skipped, never silently absent.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase

from loragate.core.machine import Machine
from loragate.matrix.case import Case, Site, Tier
from loragate.matrix.footprint import footprint_bytes
from loragate.matrix.ids import run_id, seed_of

_TIERS = (Tier.SMOKE, Tier.PREMERGE, Tier.NIGHTLY)
_GIB = 1 << 30


class SelectionError(ValueError):
    """A pattern that selects nothing: most likely a typing error, never an empty success."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A subject as the planner sees it: a name, and the reason why it cannot run a case."""

    name: str
    refuses: Callable[[Case], str | None]


@dataclass(frozen=True, slots=True)
class PlannedCase:
    """One attempt at one case of one subject."""

    subject: str
    case: Case
    run_id: str
    attempt: int
    seed: int


@dataclass(frozen=True, slots=True)
class Skipped:
    subject: str
    case: Case
    run_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class Plan:
    """`planned` is sorted by run id, then attempt; `skipped` by run id, once for all attempts."""

    tier: Tier
    machine: Machine
    planned: tuple[PlannedCase, ...]
    skipped: tuple[Skipped, ...]

    @property
    def expected(self) -> dict[tuple[str, Site], tuple[str, ...]]:
        """Run ids that must show up as executed, by subject and site; attempts not counted."""
        counts: dict[tuple[str, Site], dict[str, None]] = {}
        for planned in self.planned:
            counts.setdefault((planned.subject, planned.case.site), {})[planned.run_id] = None
        return {key: tuple(counts[key]) for key in sorted(counts)}


def plan(
    cases: Iterable[Case],
    subjects: Sequence[Candidate],
    tier: Tier,
    machine: Machine,
    *,
    attempts: Sequence[int] = (0,),
    patterns: Sequence[str] = (),
) -> Plan:
    """Plan the cases of a tier for every subject on a machine.

    `patterns` are shell patterns or plain pieces of run ids, any of which selects a case.
    Raises SelectionError if one of them selects nothing.
    """
    wanted = [case for case in cases if case.tier in tiers_within(tier)]
    pairs = [(run_id(s.name, case), s, case) for s in _by_name(subjects) for case in wanted]
    pairs.sort(key=lambda pair: pair[0])
    _check_patterns(patterns, [name for name, _, _ in pairs])
    planned: list[PlannedCase] = []
    skipped: list[Skipped] = []
    for name, subject, case in pairs:
        if not is_selected(name, patterns):
            continue
        reason = beyond_machine(case, machine) or subject.refuses(case)
        if reason is not None:
            skipped.append(Skipped(subject.name, case, name, reason))
            continue
        for attempt in sorted(set(attempts)):
            seed = seed_of(case, attempt)
            planned.append(PlannedCase(subject.name, case, name, attempt, seed))
    return Plan(tier, machine, tuple(planned), tuple(skipped))


def tiers_within(tier: Tier) -> frozenset[Tier]:
    """The tiers whose cases a run of `tier` takes."""
    return frozenset(_TIERS[: _TIERS.index(tier) + 1])


def is_selected(name: str, patterns: Sequence[str]) -> bool:
    """True if a run id matches one of the patterns, or if there are none."""
    return not patterns or any(_matches(name, pattern) for pattern in patterns)


def beyond_machine(case: Case, machine: Machine) -> str | None:
    """The reason why a case runs with no subject at all on this machine, or None."""
    if machine.interpreted:
        if case.tier is Tier.SMOKE:
            return None
        return f"tier {case.tier} needs a GPU: its shapes are beyond the interpreter"
    need = footprint_bytes(case)
    if machine.memory_bytes and need > machine.memory_bytes:
        have = machine.memory_bytes / _GIB
        return f"needs about {need / _GIB:.0f} GiB of device memory, there are {have:.0f}"
    return None


def _matches(name: str, pattern: str) -> bool:
    if any(sign in pattern for sign in "*?["):
        return fnmatchcase(name, pattern)
    # a piece never cuts a number: rank-1 is none of rank-16
    before = r"(?<!\d)" if pattern[:1].isdigit() else ""
    after = r"(?!\d)" if pattern[-1:].isdigit() else ""
    return re.search(f"{before}{re.escape(pattern)}{after}", name) is not None


def _check_patterns(patterns: Sequence[str], names: Sequence[str]) -> None:
    for pattern in patterns:
        if any(_matches(name, pattern) for name in names):
            continue
        near = get_close_matches(pattern, names, n=3, cutoff=0.5)
        hint = "".join(f"\n  nearest: {name}" for name in near)
        raise SelectionError(f"{pattern!r} selects none of {len(names)} cases{hint}")


def _by_name(subjects: Sequence[Candidate]) -> list[Candidate]:
    named = {subject.name: subject for subject in subjects}
    assert len(named) == len(subjects), "two subjects of one name"
    return list(named.values())
