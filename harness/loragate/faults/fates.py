"""Decides from the sightings of a planted process what became of the fault. Pure; no torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from loragate.core.verdict import Failure, Verdict
from loragate.faults.model import Fate, Fault, Killer, Outcome, Part, Sighting

# these say nothing about the judge that happened to run
_OF_THE_PROCESS = frozenset(
    {
        Failure.BROKEN_PROTOCOL,
        Failure.EXCEPTION,
        Failure.HANG,
        Failure.CRASH,
        Failure.CUDA_STICKY,
        Failure.OUT_OF_MEMORY,
    }
)


def killers_of(sightings: Iterable[Sighting]) -> tuple[str, ...]:
    """What detected the fault, each once: a judge by its name, or the failure of the process."""
    return tuple(dict.fromkeys(_name(s) for s in sightings if s.verdict is Verdict.FAIL))


def _name(failed: Sighting) -> str:
    of_process = failed.failure in _OF_THE_PROCESS
    return failed.failure.value if failed.failure and of_process else failed.judge


def _detected_by(killer: Killer, sightings: Iterable[Sighting]) -> bool:
    failed = [s for s in sightings if s.verdict is Verdict.FAIL and _name(s) == killer.name]
    return any(killer.item.part is not Part.CASE or s.case == killer.item.id for s in failed)


def fate_of_fault(fault: Fault, sightings: Sequence[Sighting], seconds: float) -> Outcome:
    killers = killers_of(sightings)
    broken = _breakdown(sightings)
    missing = [k.name for k in fault.killers if not _detected_by(k, sightings)]
    if broken:
        fate, message = Fate.BROKEN, broken
    elif not killers:
        fate, message = Fate.SURVIVED, f"not detected{_excuses(sightings, missing)}"
    elif missing:
        found = ", ".join(killers)
        fate = Fate.MISSED
        message = f"detected by {found}, not by {', '.join(missing)}{_excuses(sightings, missing)}"
    elif fault.only and len(killers) > 1:
        wanted = fault.killers[0].name
        others = ", ".join(name for name in killers if name != wanted)
        fate = Fate.MISSED
        message = f"detected by {others} as well, so it does not show what {wanted} adds"
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
    """The fate of a control, which has to survive, or of a fault in the baseline suite: any failure
    counts as detection. BROKEN if a judge could not judge, or if nothing passed or failed: tests
    that never ran prove nothing."""
    killers = killers_of(sightings)
    fate, message = Fate.SURVIVED, ""
    if broken := _breakdown(sightings):
        fate, message = Fate.BROKEN, broken
    elif killers:
        first = next(s for s in sightings if s.verdict is Verdict.FAIL)
        fate, message = Fate.KILLED, f"{first.judge}: {first.message}"
    elif not any(s.verdict is Verdict.PASS for s in sightings):
        fate, message = Fate.BROKEN, "no test or oracle ran"
    elif undecided := [s for s in sightings if s.verdict is Verdict.INCONCLUSIVE]:
        fate, message = Fate.BROKEN, f"{undecided[0].judge}: {undecided[0].message}"
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
    """Why required judges did not judge, where they gave a reason."""
    said = [
        f"{s.judge}: {s.verdict.value}, {s.message}"
        for s in sightings
        if s.judge in missing and s.verdict in (Verdict.SKIP, Verdict.INCONCLUSIVE)
    ]
    return f" ({'; '.join(said)})" if said else ""


def _evidence(fault: Fault, sightings: Sequence[Sighting]) -> str:
    wanted = {killer.name for killer in fault.killers}
    found = [s for s in sightings if wanted & set(killers_of([s]))]
    return f"{found[0].judge}: {found[0].message}" if found else ""
