"""A short way to write a fault or a control down.

What must detect a fault, and what must pass with a control, stands in killers.yaml, under its name:
ids of cases are long, and `loragate faults --find-killers` writes them anew.
"""

from __future__ import annotations

from typing import Any, Protocol

from loragate.faults.corpus.killers import ITEMS, KILLERS, SHOWN
from loragate.faults.model import Control, Edit, Fault, Group, Needs


class Plant(Protocol):
    def __call__(
        self,
        name: str,
        old: str,
        new: str,
        *,
        source: str,
        why: str,
        needs: Needs = Needs.CPU,
        only: bool = False,
    ) -> Fault: ...


def planting(module: str, group: Group) -> Plant:
    """Faults of one module and one group."""

    def plant(name: str, old: str, new: str, **fields: Any) -> Fault:
        fields |= {"killers": KILLERS.get(name, ()), "shown": SHOWN.get(name, ())}
        return Fault(name=name, edit=Edit(module, old, new), group=group, **fields)

    return plant


def control(name: str, why: str, edit: Edit | None = None) -> Control:
    return Control(name=name, why=why, edit=edit, items=ITEMS.get(name, ()))
