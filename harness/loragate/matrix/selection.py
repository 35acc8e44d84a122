"""Which runs were asked for: subjects x cases x draws x repeats, in one order everywhere.

Invariant: two processes with the same arguments select the same runs in the same order, because
workers that collect different tests cannot share them (pytest-xdist #432). Pure; imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from loragate.matrix.case import Case, Tier
from loragate.matrix.case_run import CaseRun, find_run, split_draw
from loragate.matrix.ids import run_id
from loragate.matrix.patterns import WILDCARDS, SelectionError, selected_ids
from loragate.matrix.plan import check_number, select_names, trials
from loragate.matrix.shards import Shard

_SHOWN = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """What was asked for. Each of `draws` is run `repeats` times; `patterns` select run ids as in
    `loragate.matrix.patterns`, and `shard`, if any, is the part of these that is run here."""

    matrix: tuple[Path, ...]
    subjects: tuple[str, ...]
    tier: Tier
    draws: tuple[int, ...] = (0,)
    repeats: int = 1
    patterns: tuple[str, ...] = ()
    shard: Shard | None = None


def select_runs(
    selection: Selection,
    cases: Iterable[Case],
    *,
    once: Callable[[str], bool] = lambda run_id: False,
) -> tuple[CaseRun, ...]:
    """Sorted by run id, draw and repeat. Runs that this machine cannot do are included: each of
    them is skipped with a reason. `once` says of a run id that it is run with the first draw alone.
    Raises SelectionError if a pattern or the shard selects nothing, or for too many runs.
    """
    cases = tuple(cases)
    named = {
        run_id(subject, case): (subject, case) for subject in selection.subjects for case in cases
    }
    by_name = {name: case for name, (_, case) in named.items()}
    selected = select_names(by_name, selection.tier, selection.patterns)
    wanted = selection.shard.part(selected) if selection.shard else frozenset(selected)
    check_number(len(wanted), len(selection.draws), selection.repeats)
    return tuple(
        CaseRun(*named[name], draw, repeat, selection.matrix)
        for name in selected
        if name in wanted
        for draw, repeat in trials(selection.draws, selection.repeats, once=once(name))
    )


def select_one(
    text: str, cases: Sequence[Case], *, subjects: Iterable[str], matrix: tuple[Path, ...]
) -> CaseRun:
    """The only run that `text` selects: an id with any subject, or a pattern, which may end as the
    id of a draw does. A pattern that names no `module:object` selects among `subjects`.

    Raises SelectionError for a pattern that selects no case or several.
    """
    found = find_run(text, cases)
    if found is not None:
        return replace(found, matrix=matrix)
    pattern, draw, repeat = split_draw(text)
    own = _own_subject(pattern)
    named = {
        run_id(subject, case): CaseRun(subject, case, draw or 0, repeat or 0, matrix)
        for subject in ([own] if own else subjects)
        for case in cases
    }
    names = sorted(selected_ids([pattern], named.keys()))
    if len(names) > 1:
        shown = "".join(f"\n  {name}" for name in names[:_SHOWN])
        more = f"\n  and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        raise SelectionError(f"{pattern!r} selects {len(names)} cases, not one:{shown}{more}")
    return named[names[0]]


def _own_subject(pattern: str) -> str | None:
    """The `module:object` that a pattern begins with; the module may hold dots."""
    module, colon, rest = pattern.partition(":")
    name = f"{module}:{rest.partition('.')[0]}"
    return name if colon and not any(sign in name for sign in WILDCARDS) else None
