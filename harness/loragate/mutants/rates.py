"""How many mutants of each kind the gate kills, without a GPU and with one. Pure; imports no torch.

Invariant: a mutant that no caller can observe counts nowhere, and one that shows on a GPU only
counts as not killed until a run on a GPU has killed it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from loragate.core.plural import counted
from loragate.mutants.model import Fate, Group
from loragate.mutants.record import SURVIVORS

_HEAD = "| mutants | not equivalent | killed without a GPU | killed with a GPU |\n|---|--:|--:|--:|"
_TITLES = {
    Group.COARSE: "coarse, drawn at random",
    Group.SUBTLE: "subtle, drawn at random",
    Group.BLIND: "blind, later runs",
}
# of the sets of blind edits, those that say most about the checks of today
_LATEST = 10
_OBSERVABLE = (Fate.KILLED, Fate.SURVIVED, Fate.NEEDS_GPU)


@dataclass(frozen=True, slots=True)
class Rate:
    """`left`: what a run without a GPU has not killed. `on_gpu`: how many of these a GPU kills;
    None where that is not on record."""

    killed: int
    left: int
    on_gpu: int | None = None

    @classmethod
    def of(cls, run: Mapping[str, Any], group: Group, gpu: Mapping[str, Any] | None) -> Self:
        """Of one kind of a run that has it. `gpu`: the run of the same name on a GPU, which planted
        what this one has left."""
        counts = run["tables"]["group"][group.value]
        observable = sum(counts[fate.value] for fate in _OBSERVABLE)
        killed = counts[Fate.KILLED.value]
        left = observable - killed
        if not left:
            return cls(killed, left, 0)
        # of another state of the code it has other mutants
        if gpu is None or gpu["state"] != run["state"]:
            return cls(killed, left)
        further = gpu["tables"]["group"].get(group.value, {})
        return cls(killed, left, further.get(Fate.KILLED.value, 0))

    def __add__(self, other: Rate) -> Rate:
        on_gpu = None
        if self.on_gpu is not None and other.on_gpu is not None:
            on_gpu = self.on_gpu + other.on_gpu
        return Rate(self.killed + other.killed, self.left + other.left, on_gpu)

    def row(self, title: str) -> str:
        with_gpu = "not measured"
        if self.on_gpu is not None:
            with_gpu = self._share(self.killed + self.on_gpu)
        cells = (title, str(self.killed + self.left), self._share(self.killed), with_gpu)
        return f"| {' | '.join(cells)} |"

    def _share(self, number: int) -> str:
        total = self.killed + self.left
        return f"{number} ({100 * number / total:.1f} %)" if total else "0"


def render_rates(
    section: Mapping[str, Any] | None,
    gpu: Mapping[str, Any] | None,
    first: Mapping[str, Any] | None,
) -> str:
    """A row for each kind of mutants, as Markdown: of all recorded runs, and of the first run of
    each set of blind edits. Each argument is a section of the record, or None."""
    sets = (rate.row(f"blind, first run of {name}") for name, rate in _first_runs(first).items())
    return _table([*sets, *_rows(section, gpu)])


def render_rates_of_kinds(
    section: Mapping[str, Any] | None,
    gpu: Mapping[str, Any] | None,
    first: Mapping[str, Any] | None,
) -> str:
    """As `render_rates`, with all sets of blind edits in one row, and the latest in another."""
    rates = list(_first_runs(first).values())
    sets = []
    if rates:
        sets.append(_sum(rates).row(f"blind, first runs of {counted(len(rates), 'set')}"))
    if len(rates) > _LATEST:
        sets.append(_sum(rates[-_LATEST:]).row(f"blind, first runs of the latest {_LATEST}"))
    return _table([*sets, *_rows(section, gpu)])


def _table(rows: Sequence[str]) -> str:
    return "\n".join([_HEAD, *rows]) if rows else "Not recorded yet."


def _first_runs(first: Mapping[str, Any] | None) -> Mapping[str, Rate]:
    """By the names of the sets, whose order is that in which they were written."""
    runs = sorted(first["runs"].items()) if first else ()
    return {name: Rate.of(run, Group.BLIND, None) for name, run in runs}


def _sum(rates: Sequence[Rate]) -> Rate:
    return sum(rates[1:], rates[0])


def _rows(section: Mapping[str, Any] | None, gpu: Mapping[str, Any] | None) -> Iterator[str]:
    runs: Mapping[str, Any] = section["runs"] if section else {}
    on_gpu: Mapping[str, Any] = gpu["runs"] if gpu else {}
    for group, title in _TITLES.items():
        rates = [
            Rate.of(run, group, on_gpu.get(name))
            for name, run in runs.items()
            if name != SURVIVORS and group.value in run["tables"]["group"]
        ]
        if rates:
            yield _sum(rates).row(title)
    again = runs.get(SURVIVORS)
    for group in (Group.COARSE, Group.SUBTLE):
        if again and group.value in again["tables"]["group"]:
            rate = Rate.of(again, group, on_gpu.get(SURVIVORS))
            yield rate.row(f"{group.value}, left by these samples, planted again later")
