"""Whether what fails on a mutant fails because of it.

Invariant: nothing kills a mutant but what has passed on sound code, after the reach was measured. A
case or test that somebody has broken since, a recorded size that no longer fits, and a process that
was ended from outside say nothing about a mutant.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from loragate.core.child_process import ProcessPool
from loragate.core.verdict import Failure, Verdict
from loragate.core.warm_server import WarmServer
from loragate.mutants.compile_check import COMPILE_LEG, run_compile_leg
from loragate.mutants.host_tests import COLLECTION
from loragate.mutants.planting import plant
from loragate.mutants.setup import Setup
from loragate.mutants.unit_runs import AT_IMPORT, IN_A_UNIT, run_units
from loragate.mutants.units import Ended, Kind, Unit


class NotSound(Exception):
    """What would kill a mutant fails without it as well. The message says how."""


@dataclass(frozen=True, slots=True)
class Planted:
    """A planted checkout in `folder`, and what runs it. `cache`: of compiled kernels."""

    folder: Path
    cache: Path
    setup: Setup
    server: WarmServer
    processes: ProcessPool

    def run(self, units: Sequence[Unit]) -> tuple[Ended | None, list[Unit]]:
        """What fails the gate, or None, and the units that have run. Raises ServerDied."""
        return run_units(units, self.folder, self.cache, self.setup, self.server)

    def compile(self) -> Ended | None:
        """How the compile leg fails, or None."""
        return run_compile_leg(self.folder, self.processes)


def killing_unit(units: Sequence[Unit], planted: Planted) -> Ended | None:
    """The first unit that fails the gate because of the mutant. One that fails on sound code as
    well, in a process that has run the same units, fails because of what these leave behind, and
    kills nothing. Raises NotSound and ServerDied."""
    while True:
        ended, ran = _run_twice_if_it_dies(units, planted)
        if ended is None:
            return None
        alone = _alone(ended, units)
        behind = [*ran, *(unit for unit in alone if unit not in ran)]
        if len(behind) < 2 or planted.run(alone)[0] is not None:
            _check_on_sound_code(ended, alone, planted)
            return ended
        sound = _run_on_sound_code(behind, planted)
        if sound is None:
            return ended
        others = [unit for unit in units if unit.name != ended.unit]
        if sound.unit != ended.unit or len(others) == len(units):
            raise _not_sound(sound)
        units = others


def killing_compile_leg(planted: Planted) -> Ended | None:
    """How the compile leg fails because of the mutant, or None. Raises NotSound."""
    ended = planted.compile()
    if ended is not None and ended.verdict is Verdict.INFRA:
        # as below: it may have been ended from outside
        ended = planted.compile()
    if ended is None:
        return None
    # one that could not judge may not be able to on sound code, either, by now
    if ended.verdict is Verdict.INFRA or COMPILE_LEG not in planted.setup.passed:
        check_compile_leg(planted)
    return ended


def check_compile_leg(planted: Planted) -> None:
    """Run the leg on sound code. Raises NotSound."""
    with tempfile.TemporaryDirectory(prefix="sound-", dir=planted.folder) as name:
        sound = replace(planted, folder=Path(name))
        plant(None, sound.folder / "planted")
        ended = sound.compile()
    if ended is not None:
        raise _not_sound(ended)
    planted.setup.passed.add(COMPILE_LEG)


def _run_twice_if_it_dies(
    units: Sequence[Unit], planted: Planted
) -> tuple[Ended | None, list[Unit]]:
    """A person, or the system for lack of memory, may have ended a process that died. Of one that
    the mutant has ended, the second ends in the same way."""
    ended, ran = planted.run(units)
    of_a_process = ended is not None and ended.judge in (AT_IMPORT, IN_A_UNIT)
    if ended is not None and of_a_process and ended.kind == Failure.CRASH:
        return planted.run(units)
    return ended, ran


def _alone(ended: Ended, units: Sequence[Unit]) -> list[Unit]:
    """As few units as it takes to see the failure: the one that failed; for a file that cannot be
    collected, or a test that only the mutant has, a test of that file; otherwise any."""
    named = [unit for unit in units if unit.name == ended.unit]
    tests = [unit for unit in units if unit.kind is Kind.TEST]
    file = _file_of(ended.unit.removeprefix(COLLECTION))
    beside = [unit for unit in tests if _file_of(unit.name) == file]
    return named or beside[:1] or tests[:1] or list(units[:1])


def _file_of(test: str) -> str:
    return test.partition("::")[0]


def _check_on_sound_code(ended: Ended, alone: Sequence[Unit], planted: Planted) -> None:
    """Once for each unit: what has passed is not run again. Raises NotSound and ServerDied."""
    passed = planted.setup.passed
    if ended.unit in passed:
        return
    sound = _run_on_sound_code(alone, planted)
    if sound is not None:
        raise _not_sound(sound)
    passed.add(ended.unit)


def _run_on_sound_code(units: Sequence[Unit], planted: Planted) -> Ended | None:
    with tempfile.TemporaryDirectory(prefix="sound-", dir=planted.folder) as name:
        cache = planted.setup.logs / "triton-cache"
        sound = replace(planted, folder=Path(name), cache=cache)
        plant(None, sound.folder / "planted")
        return sound.run(units)[0]


def _not_sound(ended: Ended) -> NotSound:
    how = ": ".join(filter(None, [ended.kind, ended.message]))
    return NotSound(f"{ended.unit} fails without a mutant: {how}")
