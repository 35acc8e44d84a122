"""Which mutants a seed draws."""

from __future__ import annotations

import random
from collections import Counter
from fnmatch import fnmatchcase

import pytest

from loragate.mutants.generation import sampling
from loragate.mutants.generation.sampling import (
    candidates,
    difference,
    sample,
    shares_by_size,
    with_ids,
)
from loragate.mutants.generation.text import Module
from loragate.mutants.model import Group
from loragate.mutants.sources import read_sources

pytest.importorskip("cosmic_ray")

pytestmark = pytest.mark.usefixtures("preloaded")

SOURCES = {
    path: text
    for path, text in read_sources().items()
    if path.startswith(("dense/l", "dense/w", "batch/", "common/"))
}
DRAWN = sample(SOURCES, 60, seed=3)


def test_a_seed_draws_the_same_mutants_again_and_another_seed_others() -> None:
    assert sample(SOURCES, 60, seed=3) == DRAWN
    assert {m.id for m in sample(SOURCES, 60, seed=4)} != {m.id for m in DRAWN}


def test_half_of_a_sample_are_subtle_mutants() -> None:
    assert Counter(m.group for m in DRAWN) == {Group.SUBTLE: 30, Group.COARSE: 30}
    assert Counter(m.group for m in sample(SOURCES, 7, seed=0))[Group.SUBTLE] == 4


def test_mutants_are_found_again_by_their_ids_and_those_that_are_gone_are_left_out() -> None:
    some = {mutant.id: mutant for mutant in DRAWN[::15]}
    path, operator, digest = min(some).split(":")
    gone = [f"{path}:{operator}:00000000", f"{path}:no-such:{digest}", f"gone.py:edge:{digest}"]
    assert {mutant.id: mutant for mutant in with_ids(SOURCES, [*some, *gone])} == some


def test_what_decides_about_speed_alone_by_now_is_not_found_again() -> None:
    path = "dense/launch.py"
    texts = (
        (candidate, text)
        for candidate in candidates(Module(path, SOURCES[path]))
        if candidate.group is Group.SPEED and (text := candidate.make()) is not None
    )
    name = sampling._mutant_of(*next(texts)).id
    assert with_ids({path: SOURCES[path]}, [name]) == []


@pytest.mark.parametrize(
    ("pattern", "groups"),
    [("bound", {Group.SUBTLE}), ("AddNot", {Group.COARSE}), ("*o*", {Group.SUBTLE, Group.COARSE})],
)
def test_a_sample_of_some_operators_takes_all_its_mutants_from_them(
    pattern: str, groups: set[Group]
) -> None:
    found = sample(SOURCES, 8, seed=3, operators=pattern)
    assert len(found) == 8
    assert {mutant.group for mutant in found} == groups
    assert all(fnmatchcase(mutant.operator, pattern) for mutant in found)
    assert sample(SOURCES, 8, seed=3, operators="no-such") == []


def test_no_two_mutants_are_alike_and_each_is_python_that_differs() -> None:
    texts = [(m.module, m.apply(SOURCES[m.module])) for m in DRAWN]
    assert len(set(texts)) == len(texts) == len({m.id for m in DRAWN})
    for path, text in texts:
        compile(text, path, "exec")
        assert text != SOURCES[path]


def test_every_module_has_a_share_and_operators_take_turns() -> None:
    subtle = [m for m in DRAWN if m.group is Group.SUBTLE]
    assert {m.module for m in subtle} == {p for p, text in SOURCES.items() if "def " in text}
    most = Counter((m.module, m.operator) for m in DRAWN).most_common(1)[0][1]
    assert most <= 3


@pytest.mark.parametrize("number", [3, 10, 101])
def test_shares_sum_up_and_follow_the_sizes(number: int) -> None:
    sizes = {"a": 10, "b": 100, "c": 1, "d": 50}
    shares = shares_by_size(sizes, number, random.Random(0))
    assert sum(shares.values()) == number
    if number >= len(sizes):
        assert min(shares.values()) >= 1
        assert shares["b"] >= shares["d"] >= shares["a"] >= shares["c"]


def test_an_id_stays_when_code_is_added_above() -> None:
    path = "batch/kernels.py"
    text = SOURCES[path]
    moved = {path: text.replace("import triton\n", "import triton\n\nADDED = None\n", 1)}
    before = {m.id for m in sample({path: text}, 40, seed=1)}
    after = {m.id for m in sample(moved, 40, seed=1)}
    assert len(before & after) >= 10


def test_a_difference_is_the_piece_that_changed() -> None:
    assert difference("ab cd ef", "ab xy ef") == (3, 5, "xy")
    assert difference("aa", "a") == (1, 2, "")
