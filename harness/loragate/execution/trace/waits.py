"""What of a Triton kernel runs ahead of its wait for the kernels before it, from its TTIR. Pure.

A kernel that is launched dependently (programmatic dependent launch) starts before those have
ended. Behind `griddepcontrol.wait` all of them are complete; ahead of it, and in a program that
ends without it, nothing is known of them but what they knew when they let this kernel start, by
`griddepcontrol.launch_dependents` or by their end.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

# inline assembly up to Triton 3.8, operations of its own from 3.9 on
_OF_THE_GRID = re.compile(r"(?:griddepcontrol\.|tt\.grid_dependency_)(wait|launch_dependents)")
_BLOCK = re.compile(r"\^[\w$]+")


@dataclass(frozen=True, slots=True)
class Waits:
    """signals_early: the next kernel may start before this one has waited. ends_unwaited: on some
    path this one never waits. Of a kernel of which nothing is known it is taken to wait first."""

    signals_early: bool = False
    ends_unwaited: bool = False


WAITS_FIRST = Waits()


@dataclass(slots=True)
class _Region:
    operation: str
    # whether the kernel has waited: ahead of the region, and behind the first of two bodies
    before: bool
    first: bool | None = None


@dataclass(slots=True)
class WaitWalk:
    """Passes the lines of a module without their locations. `has_waited`: on every path to here."""

    has_waited: bool = False
    signals_early: bool = False
    ends_unwaited: bool = False
    _is_public: bool = False
    _regions: list[_Region] = field(default_factory=list)
    # by the names of blocks: on every path that jumps there
    _jumps: dict[str, bool] = field(default_factory=dict)

    def take(self, line: str) -> None:
        if line.startswith("tt.func"):
            self._is_public, self.has_waited = "public" in line, False
            self._jumps.clear()
            self._regions.append(_Region("tt.func", before=False))
        elif line.startswith("}"):
            self._end_body(goes_on=line.endswith("{"))
        elif line.startswith("^"):
            name = _BLOCK.match(line)
            assert name is not None
            # a block that nothing has jumped to yet is one of a loop, or the body of a region
            self.has_waited = self._jumps.get(name[0], self.has_waited)
        else:
            self._take_operation(line)

    def _take_operation(self, line: str) -> None:
        rest = line.split(" = ", 1)[-1] if line.startswith("%") else line
        operation = rest.split(" ", 1)[0]
        if operation in ("cf.br", "cf.cond_br"):
            for name in _BLOCK.findall(line):
                self._jumps[name] = self._jumps.get(name, True) and self.has_waited
        elif operation == "tt.return" and self._is_public:
            self.ends_unwaited |= not self.has_waited
        else:
            self._take_assembly(line)
        if line.endswith("{"):
            self._regions.append(_Region(operation, self.has_waited))

    def _take_assembly(self, line: str) -> None:
        # one text may have both
        for found in _OF_THE_GRID.findall(line):
            if found == "wait":
                self.has_waited = True
            else:
                self.signals_early |= not self.has_waited

    def _end_body(self, *, goes_on: bool) -> None:
        if goes_on:
            region = self._regions[-1]
            region.first = self.has_waited
            if region.operation == "scf.if":
                self.has_waited = region.before
            return
        region = self._regions.pop() if self._regions else _Region("module", self.has_waited)
        if region.operation == "scf.if":
            # without a second body, one path goes past the first
            other = region.before if region.first is None else region.first
            self.has_waited &= other
        elif region.operation == "scf.for":
            # there may be no turn at all
            self.has_waited = region.before
        elif region.operation == "scf.while":
            # its condition runs in any case
            self.has_waited = bool(region.first)
