"""What must detect faults, run once on the unchanged package: what fails there detects nothing.

Pure; no torch. Of a case only the oracles run that must detect a fault, so that this costs little
beside the faults themselves.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from loragate.core.verdict import OracleName, Verdict
from loragate.faults.gate_contents import GateContents
from loragate.faults.model import Killer, Part, Sighting
from loragate.faults.order import Order, Suite
from loragate.matrix.case import Case

# those of a whole corpus run in a few processes
SOUND_DEADLINE_S = 3600.0


def sound_orders(killers: Sequence[Killer], gate: GateContents, count: int) -> list[Order]:
    """Orders for at most `count` processes, which run each of `killers` once. What runs in a
    process of its own is kept together, because that takes seconds to start."""
    oracles: dict[str, set[OracleName]] = {}
    others: dict[Part, dict[str, None]] = {Part.HOST_TEST: {}, Part.LAUNCH: {}}
    for killer in killers:
        if killer.item.part is not Part.CASE:
            others[killer.item.part][killer.item.id] = None
            continue
        wanted = oracles.setdefault(killer.item.id, set())
        # how a process ends may be due to any of them
        all_of_case = gate.cases[killer.item.id].oracles
        wanted.update([killer.by] if isinstance(killer.by, OracleName) else all_of_case)
    cases = [_narrowed(gate.cases[name], found) for name, found in oracles.items()]
    tests, launches = list(others[Part.HOST_TEST]), list(others[Part.LAUNCH])
    plain = Order(module=None, suite=Suite.GATE)
    orders = [
        replace(
            plain,
            cases=tuple(cases[first::count]),
            tests=tuple(tests[first::count]),
            launches=tuple(launches[first::count]),
        )
        for first in range(count)
    ]
    return [order for order in orders if order != plain]


def _narrowed(case: Case, oracles: set[OracleName]) -> Case:
    return replace(case, oracles=tuple(oracle for oracle in case.oracles if oracle in oracles))


def failures_of(killers: Iterable[Killer], sightings: Sequence[Sighting]) -> Mapping[Killer, str]:
    """Those of `killers` that did not pass on the unchanged package, and how."""
    found = {killer: _failure(killer, sightings) for killer in killers}
    return {killer: message for killer, message in found.items() if message}


def _failure(killer: Killer, sightings: Sequence[Sighting]) -> str:
    own = [sighting for sighting in sightings if _is_of(sighting, killer)]
    what = " ".join(dict.fromkeys([killer.item.id, killer.name]))
    for sighting in own:
        if sighting.verdict in (Verdict.FAIL, Verdict.INFRA):
            return f"{what} fails without a fault: {sighting.message}"
    if own:
        return ""
    deaths = [s.message for s in sightings if s.verdict is Verdict.INFRA or s.failure]
    return ": ".join([f"{what} did not run without a fault", *deaths[-1:]])


def _is_of(sighting: Sighting, killer: Killer) -> bool:
    if killer.item.part is Part.CASE:
        judged = not isinstance(killer.by, OracleName) or sighting.judge == killer.by
        return judged and sighting.case == killer.item.id
    # a test that is also named with its parameters reports as that
    return killer.item.id in (sighting.judge, sighting.judge.partition("[")[0])
