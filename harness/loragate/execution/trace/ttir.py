"""Which pointer arguments of a Triton kernel are read and written, from the text of its TTIR. Pure.

The walk follows pointers from loads and stores back to arguments, through loops and branches, and
marks what is reached through addresses that the kernel loads itself. Triton's own analysis in torch
gives up on every kernel with inline assembly, such as one with programmatic dependent launch.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from loragate.execution.trace.waits import Waits, WaitWalk

_VALUE = re.compile(r"%[\w$.-]+(?:#\d+)?")
_RESULT = re.compile(r"^(?P<names>%[\w$.:, %-]+?) = (?P<rest>.*)$")
_ARGUMENT = re.compile(r"(%[\w$.-]+): (!tt\.ptr<|!tt\.tensordesc<)?")
_PAIR = re.compile(r"(%[\w$.-]+) = (%[\w$.-]+(?:#\d+)?)")
_READS = ("tt.load", "tt.descriptor_load", "tt.descriptor_gather")
_WRITES = ("tt.store", "tt.descriptor_store", "tt.descriptor_scatter")
_BOTH = ("tt.atomic_rmw", "tt.atomic_cas", "tt.descriptor_reduce")


@dataclass(frozen=True, slots=True)
class PointerUse:
    """Numbers of pointer arguments, counted without the other arguments; `through_*` are those in
    which a kernel finds the addresses that it reads and writes. `by_value` are the names of other
    arguments that are addresses themselves. `early_*` are those that it uses, in either way, before
    it waits for the kernels ahead of it."""

    reads: frozenset[int]
    writes: frozenset[int]
    through_reads: frozenset[int] = frozenset()
    through_writes: frozenset[int] = frozenset()
    by_value: frozenset[str] = frozenset()
    early_reads: frozenset[int] = frozenset()
    early_writes: frozenset[int] = frozenset()


@lru_cache(maxsize=256)
def pointer_use(ttir: str) -> PointerUse:
    """Of the public function of a module whose calls are inlined."""
    walk = _walked(ttir)
    found: dict[tuple[bool, bool], set[int]] = defaultdict(set)
    by_value = set[str]()
    early: dict[bool, set[int]] = {False: set(), True: set()}
    for value, is_write, has_waited in walk.accesses:
        origins = set(walk.origins(value))
        pointers = [(walk.pointers[n], loaded) for n, loaded in origins if n in walk.pointers]
        for number, is_loaded in pointers:
            found[is_loaded, is_write].add(number)
            early[is_write] |= set() if has_waited else {number}
        # beside a pointer such an argument is an offset
        if not pointers:
            by_value |= {walk.others[name] for name, _ in origins if name in walk.others}
    sets = {key: frozenset(numbers) for key, numbers in found.items()}
    return PointerUse(
        reads=sets.get((False, False), frozenset()),
        writes=sets.get((False, True), frozenset()),
        through_reads=sets.get((True, False), frozenset()),
        through_writes=sets.get((True, True), frozenset()),
        by_value=frozenset(by_value),
        early_reads=frozenset(early[False]),
        early_writes=frozenset(early[True]),
    )


def waits_of(ttir: str) -> Waits:
    """Of the same function."""
    waits = _walked(ttir).waits
    return Waits(waits.signals_early or waits.ends_unwaited, waits.ends_unwaited)


@lru_cache(maxsize=64)
def _walked(ttir: str) -> _Walk:
    walk = _Walk()
    for line in ttir.splitlines():
        walk.take(line.split(" loc(")[0].strip() if "tt.func" not in line else line.strip())
    return walk


@dataclass(slots=True)
class _Region:
    """An operation with regions: the values that it defines, and those that its bodies start with;
    both get what the ends of its bodies hand over."""

    results: list[str] = field(default_factory=list)
    carried: list[str] = field(default_factory=list)
    # from the condition of a while loop to its body
    passed: list[str] = field(default_factory=list)


class _Walk:
    def __init__(self) -> None:
        # arguments of the function by their values: numbers of pointers, names of the others
        self.pointers: dict[str, int] = {}
        self.others: dict[str, str] = {}
        self.waits = WaitWalk()
        # values, whether they are written through, and whether the kernel has waited before
        self.accesses: list[tuple[str, bool, bool]] = []
        # value -> (where it comes from, whether it was loaded from there)
        self._from: defaultdict[str, list[tuple[str, bool]]] = defaultdict(list)
        self._regions: list[_Region] = []
        # regions side by side use the same names for other values
        self._defined: dict[str, str] = {}
        self._count = 0

    def origins(self, value: str) -> Iterator[tuple[str, bool]]:
        """What a value is computed from, arguments included; True: from what is loaded there."""
        seen, todo = set[tuple[str, bool]](), [(value, False)]
        while todo:
            here = todo.pop()
            if here in seen:
                continue
            seen.add(here)
            yield here
            name, is_loaded = here
            todo += [(origin, is_loaded or loaded) for origin, loaded in self._from[name]]

    def take(self, line: str) -> None:
        self.waits.take(line)
        if line.startswith("tt.func"):
            if "public" in line:
                self._take_arguments(_ARGUMENT.findall(line))
            self._regions.append(_Region())
        elif line.startswith("}"):
            if not line.endswith("{") and self._regions:
                self._regions.pop()
        elif line.startswith("^"):
            self._hand_over(self._regions[-1].passed, self._define(_VALUE.findall(line)))
        else:
            self._take_operation(line)

    def _take_arguments(self, found: list[tuple[str, str]]) -> None:
        pointers = self._define([name for name, pointer in found if pointer])
        others = [name for name, pointer in found if not pointer]
        self.pointers = {name: number for number, name in enumerate(pointers)}
        self.others = {
            value: name.removeprefix("%")
            for value, name in zip(self._define(others), others, strict=True)
        }

    def _take_operation(self, line: str) -> None:
        names, rest = _split(line)
        operation = rest.split(" ", 1)[0].strip('"')
        operands = [self._defined.get(v, v) for v in _VALUE.findall(rest.split(" : ")[0])]
        if operation == "scf.yield":
            self._hand_over(operands, self._regions[-1].results, self._regions[-1].carried)
        elif operation == "scf.condition":
            self._regions[-1].passed = operands[1:]
            self._hand_over(operands[1:], self._regions[-1].results)
        elif operation in ("scf.for", "scf.while", "scf.if"):
            self._open(names, rest)
        else:
            self._follow(operation, self._define(names), operands, rest)
            if line.endswith("{"):
                self._regions.append(_Region())

    def _define(self, names: list[str]) -> list[str]:
        self._count += 1
        self._defined |= {name: f"{name} {self._count}" for name in names}
        return [self._defined[name] for name in names]

    def _open(self, names: list[str], rest: str) -> None:
        # what stands before is the counter of the loop
        pairs = _PAIR.findall(rest.split("iter_args(")[-1] if "scf.for" in rest else rest)
        starts = [self._defined.get(start, start) for _, start in pairs]
        results, carried = self._define(names), self._define([inside for inside, _ in pairs])
        self._hand_over(starts, carried)
        self._hand_over(carried, results)
        self._regions.append(_Region(results, carried))

    def _hand_over(self, operands: list[str], *targets: list[str]) -> None:
        for names in targets:
            for name, value in zip(names, operands, strict=False):
                self._from[name].append((value, False))

    def _follow(self, operation: str, names: list[str], operands: list[str], rest: str) -> None:
        is_read = operation in (*_READS, *_BOTH)
        is_write = operation in (*_WRITES, *_BOTH)
        if operands and (is_read or is_write):
            self._access(operands[:1], [False] * is_read + [True] * is_write)
            for name in names:
                self._from[name].append((operands[0], True))
            return
        if operation == "tt.elementwise_inline_asm" and "!tt.ptr<" in rest:
            # assembly that gets a pointer may do anything with it
            self._access(operands, (False, True))
        # an offset is no pointer, and neither is what chooses one of two
        if operation in ("tt.addptr", "tt.advance"):
            origins = operands[:1]
        else:
            origins = operands[1:] if operation == "arith.select" else operands
        for name in names:
            self._from[name] += [(origin, False) for origin in origins]

    def _access(self, values: Sequence[str], writes: Sequence[bool]) -> None:
        self.accesses += [(v, write, self.waits.has_waited) for v in values for write in writes]


def _split(line: str) -> tuple[list[str], str]:
    """The values that a line defines, and the rest of it."""
    match = _RESULT.match(line)
    if match is None:
        return [], line
    names: list[str] = []
    for part in match["names"].split(","):
        name, _, count = part.strip().partition(":")
        names += [f"{name}#{k}" for k in range(int(count))] if count else [name]
    return names, match["rest"]
