"""A sample covers every allowed pair, and its points never change."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable, Sequence
from itertools import combinations
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from loragate.matrix.sample import Exclusion, full_product, is_excluded, pairwise

Point = Sequence[int]


def _pairs(points: Iterable[Point]) -> set[tuple[int, int, int, int]]:
    return {
        (i, point[i], j, point[j])
        for point in points
        for i, j in combinations(range(len(point)), 2)
    }


@st.composite
def _products(draw: st.DrawFn) -> tuple[list[int], list[Exclusion]]:
    sizes = draw(st.lists(st.integers(1, 4), min_size=2, max_size=5))
    exclusions: list[Exclusion] = []
    for _ in range(draw(st.integers(0, 6))):
        axes = draw(st.sets(st.integers(0, len(sizes) - 1), min_size=1, max_size=3))
        exclusions.append(
            {
                axis: draw(st.frozensets(st.integers(0, sizes[axis] - 1), min_size=1))
                for axis in axes
            }
        )
    return sizes, exclusions


@settings(max_examples=300, derandomize=True)
@given(_products())
@example(([1, 1, 2, 1, 1], [{0: frozenset({0}), 1: frozenset({0}), 2: frozenset({0})}]))
def test_a_sample_holds_exactly_the_pairs_of_the_allowed_product(
    product: tuple[list[int], list[Exclusion]],
) -> None:
    sizes, exclusions = product
    sample = pairwise(sizes, exclusions)
    assert _pairs(sample) == _pairs(full_product(sizes, exclusions))
    assert not [point for point in sample if is_excluded(point, exclusions)]
    assert len(set(sample)) == len(sample)


def test_a_sample_of_a_large_product_is_small(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # not what an earlier run has left
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    sizes = [8, 10, 12, 4, 3, 5, 2, 4, 2]
    sample = pairwise(sizes, [])
    pairs = sum(a * b for a, b in combinations(sizes, 2))
    assert len(_pairs(sample)) == pairs
    # no sample can be smaller than the two largest axes; the product has 460800 points
    assert 120 <= len(sample) <= 140


def test_an_exclusion_of_everything_leaves_nothing() -> None:
    assert pairwise([2, 3], [{0: frozenset({0, 1})}]) == []


def test_a_sample_is_pinned_because_ids_and_history_depend_on_it() -> None:
    sample = pairwise([3, 2, 2], [{0: frozenset({2}), 1: frozenset({0, 1}), 2: frozenset({0})}])
    assert sample == [(1, 1, 1), (2, 0, 1), (2, 1, 1), (0, 0, 1), (0, 1, 0), (1, 0, 0)]


def test_a_sample_does_not_depend_on_the_hash_seed_of_the_process() -> None:
    code = (
        "from loragate.matrix.sample import pairwise\n"
        "print(pairwise([5, 4, 6, 3], [{0: frozenset({1}), 2: frozenset({3, 4})}]))"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for seed in ("0", "1", "2")
    }
    assert len(outputs) == 1
