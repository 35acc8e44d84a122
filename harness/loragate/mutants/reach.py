"""Which cases and host tests reach which line of lorakernels. Pure but for its file; no torch.

A unit that runs none of the lines of a mutated statement runs the same code as before, so it need
not run, unless it reads the module. Code that runs at import is reached by everything.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loragate.compile_leg import BASELINE
from loragate.core.checkout import project_root
from loragate.core.files import write_atomically
from loragate.core.json_text import parse_json
from loragate.core.versions import versions
from loragate.faults.planting import package_folder
from loragate.mutants.planting import HOST_TESTS, SHARED
from loragate.mutants.sources import Place
from loragate.mutants.tracing import WHOLE_TEXT
from loragate.mutants.units import Kind, Unit

# what of the harness decides what a unit does, and what becomes of it
_HARNESS = (
    *("core", "matrix", "protocol", "inputs", "subjects", "engine", "execution", "oracles"),
    *("run", "events", "compile_leg", "plugin", "mutants", "faults/planting.py"),
)
# these say which mutants there are, and what a survivor is called
_OF_MUTANTS = ("mutants/blind", "mutants/equivalents.yaml")


@dataclass(frozen=True, slots=True)
class Reach:
    """`lines`: for each line of each module the units that run it, as bits of an integer in the
    order of `units`. `at_import`: lines that every unit runs, because importing does. `compiled`:
    the modules whose change may change a kernel of the compile leg."""

    digest: str
    units: tuple[Unit, ...]
    lines: Mapping[str, Mapping[int, int]]
    at_import: Mapping[str, frozenset[int]]
    compiled: frozenset[str]

    def units_of(self, module: str, place: Place) -> tuple[Unit, ...]:
        """The units that run a statement, or read its module."""
        if place.lines is None or place.lines & self.at_import.get(module, frozenset()):
            return self.units
        by_line = self.lines.get(module, {})
        bits = by_line.get(WHOLE_TEXT, 0)
        for line in place.lines:
            bits |= by_line.get(line, 0)
        return tuple(unit for number, unit in enumerate(self.units) if bits >> number & 1)

    def sites_of(self, module: str) -> frozenset[str]:
        """The sites whose cases run any line of a module."""
        bits = 0
        for found in self.lines.get(module, {}).values():
            bits |= found
        units = [unit for number, unit in enumerate(self.units) if bits >> number & 1]
        return frozenset(site_of(unit) for unit in units if unit.kind is Kind.CASE)

    @property
    def host_tests(self) -> tuple[str, ...]:
        return tuple(unit.name for unit in self.units if unit.kind is Kind.TEST)


def site_of(unit: Unit) -> str:
    """The site of a case, which follows the subject in its run id."""
    return unit.name.split(".")[1]


def reach_of(
    digest: str,
    units: Sequence[Unit],
    traces: Sequence[Mapping[str, Iterable[int]]],
    at_import: Mapping[str, Iterable[int]],
    compiled: Iterable[str],
) -> Reach:
    """`traces`: the lines by module that each of `units` runs."""
    lines: dict[str, dict[int, int]] = {}
    for number, trace in enumerate(traces):
        for module, found in trace.items():
            by_line = lines.setdefault(module, {})
            for line in found:
                by_line[line] = by_line.get(line, 0) | 1 << number
    imported = {module: frozenset(found) for module, found in at_import.items()}
    return Reach(digest, tuple(units), lines, imported, frozenset(compiled))


def state_digest() -> str:
    """Changes with whatever may change the fate of a mutant: the package, all that is planted with
    it, what the compile leg compares with, the parts of the harness that run them, and the versions
    of what these use."""
    root, harness = project_root(), Path(__file__).resolve().parents[1]
    tops = [package_folder(), BASELINE, *(root / name for name in (*SHARED, *HOST_TESTS))]
    tops += [harness / name for name in _HARNESS]
    left_out = [harness / name for name in _OF_MUTANTS]
    whole = hashlib.sha256(json.dumps(versions(), sort_keys=True).encode())
    for top in tops:
        for path in sorted(top.rglob("*")) if top.is_dir() else [top]:
            of_mutants = any(path.is_relative_to(other) for other in left_out)
            if path.is_file() and "__pycache__" not in path.parts and not of_mutants:
                whole.update(f"{path.relative_to(top.parent)}\0".encode())
                whole.update(path.read_bytes() + b"\0")
    return whole.hexdigest()[:16]


def save_reach(reach: Reach, path: Path) -> None:
    document = {
        "digest": reach.digest,
        "units": [[unit.kind.value, unit.name, round(unit.seconds, 3)] for unit in reach.units],
        "lines": {
            module: {str(line): f"{bits:x}" for line, bits in sorted(found.items())}
            for module, found in sorted(reach.lines.items())
        },
        "at_import": {module: sorted(found) for module, found in sorted(reach.at_import.items())},
        "compiled": sorted(reach.compiled),
    }
    write_atomically(path, json.dumps(document))


def load_reach(path: Path, digest: str) -> Reach | None:
    """None if there is none of this state of the code, or what is there cannot be read."""
    try:
        document = parse_json(path.read_bytes())
        return _reach_in(document) if document["digest"] == digest else None
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        # it only saves time, and is measured again
        return None


def _reach_in(document: Any) -> Reach:
    return Reach(
        digest=document["digest"],
        units=tuple(Unit(Kind(kind), name, seconds) for kind, name, seconds in document["units"]),
        lines={
            module: {int(line): int(bits, 16) for line, bits in found.items()}
            for module, found in document["lines"].items()
        },
        at_import={module: frozenset(found) for module, found in document["at_import"].items()},
        compiled=frozenset(document["compiled"]),
    )
