"""Which mutants of a module there are, and which of them a seed chooses. Pure.

A sample has as many subtle as coarse mutants. Each module has a share by its size, at least one
mutant if there are enough, and within a module the operators take turns: most changes that
cosmic-ray makes are swaps of a binary operator.
"""

from __future__ import annotations

import fnmatch
import hashlib
import math
import random
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from loragate.mutants.generation import coarse, subtle
from loragate.mutants.generation.scope import gpu_only, left_out, speed_only
from loragate.mutants.generation.text import Module, Span, within
from loragate.mutants.model import Group, Mutant, Sources
from loragate.mutants.sources import line_of, place_of


@dataclass(frozen=True, slots=True)
class Candidate:
    """A mutant before it is made. `make` gives the text of the whole module, or None."""

    module: Module
    group: Group
    operator: str
    span: Span
    make: Callable[[], str | None]


def candidates(module: Module) -> list[Candidate]:
    """All there are; what only changes speed has the group SPEED."""
    outside, speed = left_out(module), speed_only(module)
    return [
        found if not within(found.span, speed) else _of_speed(found)
        for found in (*_subtle(module), *_coarse(module))
        if not within(found.span, outside)
    ]


def _subtle(module: Module) -> Iterator[Candidate]:
    for change in subtle.changes(module):
        make = partial(_replaced, module.text, change.span, change.new)
        yield Candidate(module, Group.SUBTLE, change.operator, change.span, make)


def _coarse(module: Module) -> Iterator[Candidate]:
    for spot in coarse.spots(module):
        make = partial(coarse.changed_text, module, spot)
        yield Candidate(module, Group.COARSE, spot.family, spot.span, make)


def _of_speed(found: Candidate) -> Candidate:
    return Candidate(found.module, Group.SPEED, found.operator, found.span, found.make)


def _replaced(text: str, span: Span, new: str) -> str:
    return text[: span[0]] + new + text[span[1] :]


def sample(sources: Sources, number: int, seed: int, operators: str = "*") -> list[Mutant]:
    """`number` mutants of `sources` by the operators whose names match, or all that there are; the
    same for the same arguments."""
    modules = [Module(path, text) for path, text in sorted(sources.items())]
    found = {
        module.path: [c for c in candidates(module) if fnmatch.fnmatchcase(c.operator, operators)]
        for module in modules
    }
    taken: set[tuple[str, str]] = set()
    return [
        mutant
        for group, share in _shares_of_groups(found, number).items()
        for mutant in _of_group(modules, found, group, share, seed, taken)
    ]


def with_ids(sources: Sources, ids: Collection[str]) -> list[Mutant]:
    """The mutants of `sources` that have these ids, but for those that a sample would not have."""
    wanted = {id.rpartition(":")[0] for id in ids}
    paths = {id.partition(":")[0] for id in ids} & sources.keys()
    named = (
        (candidate, text)
        for path in sorted(paths)
        for candidate in _of_operators(Module(path, sources[path]), wanted)
        if _has_id(candidate, ids) and (text := _valid(candidate)) is not None
    )
    mutants = (_mutant_of(candidate, text) for candidate, text in named)
    return list({mutant.id: mutant for mutant in mutants}.values())


def _of_operators(module: Module, wanted: Collection[str]) -> Iterator[Candidate]:
    """`wanted`: ids without what tells those of one operator apart."""
    for candidate in candidates(module):
        is_speed = candidate.group is Group.SPEED
        if not is_speed and f"{module.path}:{candidate.operator}" in wanted:
            yield candidate


def _has_id(candidate: Candidate, ids: Collection[str]) -> bool:
    text = candidate.make()
    return text is not None and _id(candidate, *difference(candidate.module.text, text)) in ids


def _shares_of_groups(found: Mapping[str, Sequence[Candidate]], number: int) -> dict[Group, int]:
    """Half each, the subtle ones rounded up; all to one group where the other has no candidates."""
    groups = {candidate.group for candidates in found.values() for candidate in candidates}
    if Group.COARSE not in groups:
        return {Group.SUBTLE: number}
    if Group.SUBTLE not in groups:
        return {Group.COARSE: number}
    return {Group.SUBTLE: math.ceil(number / 2), Group.COARSE: number // 2}


def _of_group(
    modules: Sequence[Module],
    found: Mapping[str, Sequence[Candidate]],
    group: Group,
    number: int,
    seed: int,
    taken: set[tuple[str, str]],
) -> Iterator[Mutant]:
    draws = {
        module.path: _drawn(module, found[module.path], group, seed, taken) for module in modules
    }
    sizes = {
        module.path: module.text.count("\n")
        for module in modules
        if any(candidate.group is group for candidate in found[module.path])
    }
    left = number
    shares = shares_by_size(sizes, number, random.Random(f"{seed} {group}"))
    # what a small module cannot give is taken from the others, largest first
    for path in [*shares, *sorted(sizes, key=lambda path: (-sizes[path], path))]:
        wanted = min(left, shares.pop(path, left))
        for mutant in _first(draws[path], wanted):
            left -= 1
            yield mutant


def _first(mutants: Iterator[Mutant], number: int) -> Iterator[Mutant]:
    for _ in range(number):
        mutant = next(mutants, None)
        if mutant is None:
            return
        yield mutant


def shares_by_size(sizes: Mapping[str, int], number: int, chance: random.Random) -> dict[str, int]:
    """How many of `number` each module gets: one each, if there are enough, and the rest by the
    method of largest remainders."""
    paths = sorted(sizes)
    if number < len(paths):
        # without a module of its own for each, larger ones are likelier
        keys = {path: chance.random() ** (1 / max(1, sizes[path])) for path in paths}
        return dict.fromkeys(sorted(paths, key=keys.__getitem__, reverse=True)[:number], 1)
    rest, total = number - len(paths), sum(sizes.values()) or 1
    exact = {path: rest * sizes[path] / total for path in paths}
    shares = {path: 1 + math.floor(exact[path]) for path in paths}
    most = sorted(paths, key=lambda path: (math.floor(exact[path]) - exact[path], path))
    for path in most[: number - sum(shares.values())]:
        shares[path] += 1
    return shares


def _drawn(
    module: Module,
    found: Sequence[Candidate],
    group: Group,
    seed: int,
    taken: set[tuple[str, str]],
) -> Iterator[Mutant]:
    """The mutants of one group of a module in the order in which the seed takes them, without those
    that are no Python, change nothing, or make a text that is already taken."""
    chance = random.Random(f"{seed} {group} {module.path}")
    by_operator: dict[str, list[Candidate]] = defaultdict(list)
    for candidate in found:
        if candidate.group is group:
            by_operator[candidate.operator].append(candidate)
    names = sorted(by_operator)
    chance.shuffle(names)
    for name in names:
        chance.shuffle(by_operator[name])
    while any(by_operator.values()):
        for name in names:
            while by_operator[name]:
                candidate = by_operator[name].pop()
                text = _valid(candidate)
                if text is not None and (module.path, text) not in taken:
                    taken.add((module.path, text))
                    yield _mutant_of(candidate, text)
                    break


def _valid(candidate: Candidate) -> str | None:
    text = candidate.make()
    if text is None or text == candidate.module.text:
        return None
    try:
        compile(text, candidate.module.path, "exec")
    except (SyntaxError, ValueError):
        return None
    return text


def _mutant_of(candidate: Candidate, text: str) -> Mutant:
    module = candidate.module
    start, end, new = difference(module.text, text)
    first, last = line_of(module.text, start), line_of(module.text, max(start, end - 1))
    return Mutant(
        id=_id(candidate, start, end, new),
        module=module.path,
        start=start,
        end=end,
        new=new,
        operator=candidate.operator,
        group=candidate.group,
        line=first,
        end_line=last,
        function=place_of(module.text, first, last).function,
        needs_gpu=within(candidate.span, gpu_only(module)),
    )


def difference(old: str, new: str) -> tuple[int, int, str]:
    """Start and end of the piece of `old` that differs, and what stands there in `new`."""
    start = 0
    while start < min(len(old), len(new)) and old[start] == new[start]:
        start += 1
    tail = 0
    while tail < min(len(old), len(new)) - start and old[-1 - tail] == new[-1 - tail]:
        tail += 1
    return start, len(old) - tail, new[start : len(new) - tail]


def _id(candidate: Candidate, start: int, end: int, new: str) -> str:
    """Does not change with the code before it, unless the same line stands there as well."""
    text = candidate.module.text
    begin = text.rfind("\n", 0, start) + 1
    stop = text.find("\n", end)
    lines = text[begin : stop if stop >= 0 else len(text)]
    same = text.count(lines, 0, begin)
    what = f"{start - begin} {end - start} {same}\0{lines}\0{new}"
    digest = hashlib.blake2b(what.encode(), digest_size=4).hexdigest()
    return f"{candidate.module.path}:{candidate.operator}:{digest}"
