"""Small cases to plant a fault under, and a short way to write a fault down.

The numeric oracles judge every case. The others are named by the faults that they should detect.
"""

from __future__ import annotations

from typing import Any, Protocol

from loragate.core.verdict import OracleName
from loragate.faults.model import Check, Edit, Fault, Group, Killer, Needs
from loragate.matrix.case import Case, Dtype, Site

NUMERIC = (
    OracleName.REFERENCE,
    OracleName.EXACT,
    OracleName.BASE_ROWS,
    OracleName.CANARY,
    OracleName.REPEAT,
    OracleName.PERMUTE,
    OracleName.SEQUENCE,
)
EVERY = tuple(OracleName)

# more than one tile, unequal slices, a slot without rows
_DEFAULTS: dict[str, Any] = {
    "tokens": 21,
    "in_features": 48,
    "slices": (48, 16, 16),
    "rank": 8,
    "slots": 3,
    "dtype": Dtype.BF16,
    "oracles": NUMERIC,
}


def delta(**axes: Any) -> Case:
    return Case(**({"site": Site.DENSE_DELTA} | _DEFAULTS | axes))


# for faults that every oracle judges
SMALL = delta(tokens=9, in_features=16, slices=(16, 8), slots=3, rank=4, oracles=EVERY)


def linear(**axes: Any) -> Case:
    return Case(**({"site": Site.LORA_LINEAR} | _DEFAULTS | axes))


class Plant(Protocol):
    def __call__(
        self,
        name: str,
        old: str,
        new: str,
        *,
        source: str,
        why: str,
        killers: tuple[Killer, ...],
        cases: tuple[Case, ...] = (),
        checks: tuple[Check, ...] = (),
        needs: Needs = Needs.CPU,
        only: bool = False,
    ) -> Fault: ...


def planting(module: str, group: Group) -> Plant:
    """Faults of one module and one group."""

    def plant(name: str, old: str, new: str, **fields: Any) -> Fault:
        return Fault(name=name, edit=Edit(module, old, new), group=group, **fields)

    return plant
