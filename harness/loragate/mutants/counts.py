"""How many mutants were killed: by group, by module, by operator. Pure; imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from loragate.mutants.model import Fate, Group, Mutant, Result

Outcome = tuple[Mutant, Result]
Counts = Mapping[str, int]

_FATES = (Fate.KILLED, Fate.SURVIVED, Fate.EQUIVALENT, Fate.NEEDS_GPU, Fate.BROKEN)
_COLUMNS = ("mutants", *(fate.value for fate in _FATES), "rate")


def count(outcomes: Iterable[Outcome], key: Callable[[Mutant], str]) -> dict[str, dict[str, int]]:
    """The number of each fate, by what `key` says of a mutant."""
    found: dict[str, dict[str, int]] = {}
    for mutant, result in outcomes:
        fates = found.setdefault(key(mutant), {fate.value: 0 for fate in _FATES})
        fates[result.fate.value] += 1
    return {name: found[name] for name in sorted(found)}


def counted(outcomes: Sequence[Outcome]) -> dict[str, dict[str, Any]]:
    """All tables of a run, by title."""
    tables: dict[str, dict[str, Any]] = {
        "group": count(outcomes, lambda mutant: mutant.group.value)
    }
    for group in Group:
        own = [outcome for outcome in outcomes if outcome[0].group is group]
        if own:
            tables[f"{group.value}: module"] = count(own, lambda mutant: mutant.module)
            tables[f"{group.value}: operator"] = count(own, lambda mutant: mutant.operator)
    return tables


def rate(counts: Counts) -> str:
    """Of those that could be killed here, the share that was."""
    killed = counts[Fate.KILLED]
    tried = killed + counts[Fate.SURVIVED]
    return f"{100 * killed / tried:.1f} %" if tried else "-"


def summed(table: Mapping[str, Counts]) -> dict[str, int]:
    return {fate.value: sum(counts[fate.value] for counts in table.values()) for fate in _FATES}


def merged(tables: Iterable[Mapping[str, Counts]]) -> dict[str, dict[str, int]]:
    """Tables of several runs as one."""
    found: dict[str, dict[str, int]] = {}
    for table in tables:
        for name, counts in table.items():
            own = found.setdefault(name, {fate.value: 0 for fate in _FATES})
            for fate, number in counts.items():
                own[fate] += number
    return {name: found[name] for name in sorted(found)}


def rows_of(table: Mapping[str, Counts]) -> Iterator[tuple[str, ...]]:
    """Cells: the name, how many mutants, how many of each fate, the rate."""
    everything = dict(table) | ({"all": summed(table)} if len(table) > 1 else {})
    for name, counts in everything.items():
        fates = [counts[fate.value] for fate in _FATES]
        yield (name, str(sum(fates)), *map(str, fates), rate(counts))


def markdown(title: str, table: Mapping[str, Counts]) -> str:
    """A table of Markdown, with a row for all where there are several."""
    head = f"| {title} | {' | '.join(_COLUMNS)} |\n|---|{'--:|' * len(_COLUMNS)}"
    return "\n".join([head, *(f"| {' | '.join(row)} |" for row in rows_of(table))])


def terminal(title: str, table: Mapping[str, Counts]) -> str:
    rows = [(title, *_COLUMNS), *rows_of(table)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join(
        f"{row[0]:<{widths[0]}}  "
        + "  ".join(f"{cell:>{width}}" for cell, width in zip(row[1:], widths[1:], strict=True))
        for row in rows
    )
