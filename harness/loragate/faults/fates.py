"""From what a planted process said to what became of the fault. Pure; imports no torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from loragate.core.verdict import Failure, Verdict
from loragate.faults.model import Fate, Fault, Outcome, Sighting

# told by whatever judge happened to run: not to its credit
_OF_THE_PROCESS = frozenset(
    {Failure.EXCEPTION, Failure.HANG, Failure.CRASH, Failure.CUDA_STICKY, Failure.OUT_OF_MEMORY}
)


def killers_of(sightings: Iterable[Sighting]) -> tuple[str, ...]:
    """Who noticed, each once: a judge that found what it looks for, or what the process met."""
    names: dict[str, None] = {}
    for sighting in sightings:
        if sighting.verdict is Verdict.FAIL and sighting.failure is not None:
            of_process = sighting.failure in _OF_THE_PROCESS
            names[sighting.failure.value if of_process else sighting.judge] = None
    return tuple(names)


def fate_of_fault(fault: Fault, sightings: Sequence[Sighting], seconds: float) -> Outcome:
    killers = killers_of(sightings)
    broken = _breakdown(sightings)
    missing = [killer.value for killer in fault.killers if killer.value not in killers]
    if broken:
        fate, message = Fate.BROKEN, broken
    elif not killers:
        fate, message = Fate.SURVIVED, f"nobody noticed{_excuses(sightings, missing)}"
    elif missing:
        noticed = ", ".join(killers)
        fate = Fate.MISSED
        message = f"noticed by {noticed}, not by {', '.join(missing)}{_excuses(sightings, missing)}"
    elif fault.only and len(killers) > 1:
        others = ", ".join(name for name in killers if name != fault.killers[0])
        fate = Fate.MISSED
        message = f"noticed by {others} as well: it does not show what {fault.killers[0]} is for"
    else:
        fate, message = Fate.KILLED, _evidence(fault, sightings)
    return Outcome(
        name=fault.name,
        fate=fate,
        killers=killers,
        sightings=tuple(sightings),
        message=message,
        seconds=seconds,
    )


def fate_by_anyone(name: str, sightings: Sequence[Sighting], seconds: float) -> Outcome:
    """Of a control, which has to survive, and of a fault in the stand-in: whoever notices will do,
    but somebody must look, since tests that never ran let nothing pass."""
    killers = killers_of(sightings)
    fate, message = Fate.SURVIVED, ""
    if broken := _breakdown(sightings):
        fate, message = Fate.BROKEN, broken
    elif killers:
        first = next(s for s in sightings if s.verdict is Verdict.FAIL)
        fate, message = Fate.KILLED, f"{first.judge}: {first.message}"
    elif not any(s.verdict is Verdict.PASS for s in sightings):
        fate, message = Fate.BROKEN, "nobody looked"
    return Outcome(
        name=name,
        fate=fate,
        killers=killers,
        sightings=tuple(sightings),
        message=message,
        seconds=seconds,
    )


def _breakdown(sightings: Sequence[Sighting]) -> str:
    infra = next((s for s in sightings if s.verdict is Verdict.INFRA), None)
    return f"{infra.judge}: {infra.message}" if infra else ""


def _excuses(sightings: Sequence[Sighting], missing: Sequence[str]) -> str:
    """Why those who should have noticed did not judge, if they say so."""
    said = [
        f"{s.judge}: {s.verdict.value}, {s.message}"
        for s in sightings
        if s.judge in missing and s.verdict in (Verdict.SKIP, Verdict.INCONCLUSIVE)
    ]
    return f" ({'; '.join(said)})" if said else ""


def _evidence(fault: Fault, sightings: Sequence[Sighting]) -> str:
    wanted = {killer.value for killer in fault.killers}
    found = [s for s in sightings if wanted & set(killers_of([s]))]
    return f"{found[0].judge}: {found[0].message}" if found else ""
