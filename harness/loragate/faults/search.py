"""Finds what the gate detects a fault with, so that killers.yaml can name it.

Cases come first, because they are what people wait for: those of the sites that the fault can
change, the smaller ones before the larger ones, up to the first that detects it. Where no case
does, all host tests run, up to the first that fails.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from loragate.core.verdict import Failure, OracleName, Verdict
from loragate.core.warm_server import WarmServer
from loragate.faults.fates import killers_of
from loragate.faults.gate_contents import GateContents
from loragate.faults.model import Edit, Fault, GateItem, Killer, Part, Sighting
from loragate.faults.order import Order, Suite
from loragate.faults.runner import Setup, run_order, run_unchanged
from loragate.faults.sound import failures_of, sound_orders
from loragate.matrix.case import Case, Site

_DELTA_NET, _EMBEDDING = (Site.GDN_IN_PROJ,), (Site.EMBEDDING,)
_LINEAR = (Site.DENSE_DELTA, Site.LORA_LINEAR, *_DELTA_NET, *_EMBEDDING)
_OF_EXPERTS = (Site.MOE_DELTA, Site.MOE_LAYER)
# many cases run in one process
_DEADLINE_S = 3600.0


class NotSound(Exception):
    """What detects a fault fails without it as well."""


def find_killers(fault: Fault, setup: Setup, server: WarmServer) -> tuple[Killer, ...]:
    """The first item of the gate that detects the fault, with each oracle that does; empty if
    nothing does. Raises StaleAnchor, ServerDied, and NotSound where that item fails without the
    fault as well."""
    setup = replace(setup, deadline_s=_DEADLINE_S)
    for order in _orders(fault.edit, setup.gate):
        found = _killers(run_order(order, fault.edit, setup, server))
        if found:
            _check_unchanged(found, setup, server)
            return found
    return ()


def _check_unchanged(killers: Sequence[Killer], setup: Setup, server: WarmServer) -> None:
    sightings = [
        sighting
        for order in sound_orders(killers, setup.gate, 1)
        for sighting in run_unchanged(order, setup, server)
    ]
    for message in failures_of(killers, sightings).values():
        raise NotSound(message)


def _orders(edit: Edit, gate: GateContents) -> Iterable[Order]:
    order = Order(module=edit.module, suite=Suite.GATE, first_only=True)
    yield replace(order, cases=tuple(sorted(_cases(edit, gate), key=_size)))
    yield replace(order, tests=tuple(sorted(gate.host_tests)))


def _cases(edit: Edit, gate: GateContents) -> list[Case]:
    sites = _sites(edit.module)
    return [case for case in gate.cases.values() if case.site in sites]


def _sites(module: str) -> tuple[Site, ...]:
    """The sites that a module of the kernels can change."""
    if module.startswith(("lorakernels.common.", "lorakernels.runtime.")):
        return (*_LINEAR, *_OF_EXPERTS)
    if "gdn" in module:
        return _DELTA_NET
    if "embedding" in module:
        return _EMBEDDING
    return _OF_EXPERTS if "moe" in module or "expert" in module else _LINEAR


def _size(case: Case) -> int:
    """The slowest oracles cost more than any size of a smoke case."""
    slow = len({OracleName.GUARD, OracleName.COMPILE} & set(case.oracles))
    return (1 + slow) * case.tokens * max(1, case.top_k) * (case.in_features + case.rank)


def _killers(sightings: Iterable[Sighting]) -> tuple[Killer, ...]:
    found: dict[Killer, None] = {}
    for sighting in sightings:
        if sighting.verdict is Verdict.FAIL and sighting.part is not None:
            found[_killer(sighting, sighting.part)] = None
    return tuple(found)


def _killer(failed: Sighting, part: Part) -> Killer:
    if part is not Part.CASE:
        return Killer(GateItem(part, failed.judge))
    (name,) = killers_of([failed])
    by = OracleName(name) if name in set(OracleName) else Failure(name)
    return Killer(GateItem(part, failed.case), by)
