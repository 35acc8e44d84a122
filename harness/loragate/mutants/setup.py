"""What all mutants of a run share, and which units may kill one of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from loragate.mutants.model import Mutant
from loragate.mutants.ordering import Kill, ordered
from loragate.mutants.reach import Reach, site_of
from loragate.mutants.sources import Place
from loragate.mutants.units import LEAST_DEADLINE_S, Kind, Unit


@dataclass(slots=True, kw_only=True)
class Setup:
    """`known`: the file with the names of all host tests; `logs`: a folder; `gpu_cases`: what runs
    on a GPU in place of the units of `reach`. While mutants run, `kills` grows, and `passed`: what
    would have killed a mutant and has passed on sound code."""

    reach: Reach
    known: Path
    logs: Path
    jobs: int = 2
    least_deadline_s: float = LEAST_DEADLINE_S
    gpu_cases: tuple[Unit, ...] = ()
    kills: list[Kill] = field(default_factory=list)
    passed: set[str] = field(default_factory=set)

    @property
    def gpu(self) -> bool:
        return bool(self.gpu_cases)

    @property
    def sound_units(self) -> tuple[Unit, ...]:
        """What must pass without a mutant before any is planted. Reach was measured on sound code,
        so that without a GPU the quickest unit of each kind shows whether units run at all."""
        if self.gpu:
            return self.gpu_cases
        kinds = ([u for u in self.reach.units if u.kind is kind] for kind in Kind)
        return tuple(min(units, key=lambda unit: unit.seconds) for units in kinds if units)

    def compiles(self, mutant: Mutant) -> bool:
        """Whether the compile leg may kill a mutant."""
        return not self.gpu and mutant.module in self.reach.compiled

    def units_of(self, mutant: Mutant, place: Place) -> tuple[Unit, ...]:
        """What may kill a mutant, in a good order."""
        if not self.gpu:
            units = self.reach.units_of(mutant.module, place)
        else:
            # of the cases that need a GPU it is known which sites reach the module
            sites = self.reach.sites_of(mutant.module)
            near = [unit for unit in self.gpu_cases if site_of(unit) in sites]
            units = tuple(near) or self.gpu_cases
        return ordered(units, mutant.module, mutant.function, list(self.kills))

    def cache_of(self, mutant: Mutant, place: Place, folder: Path) -> Path:
        """Of compiled kernels. A kernel is known by its code and that of its callees, but not by
        the constants of modules and the defaults of arguments."""
        in_code = place.lines is not None and mutant.line in place.lines
        return (self.logs if self.gpu and in_code else folder) / "triton-cache"
