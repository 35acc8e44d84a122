"""The boundary rows of experts stand where lorakernels takes another way; plans move when they are
tuned."""

from __future__ import annotations

import itertools
import pathlib
from dataclasses import dataclass, fields
from typing import Any

import pytest
import yaml

pytest.importorskip("triton", reason="lorakernels needs triton")

from lorakernels.moe.delta import plan as plans
from lorakernels.moe.delta.plan import MoEPath, MoEShape, plan_path
from lorakernels.moe.tiles import num_bins
from lorakernels.runtime.tuning import DEFAULT

_FILE = pathlib.Path(__file__).parents[2] / "cases" / "moe_delta.yaml"
_PLANNERS = {
    MoEPath.TWO_KERNEL: (plans.plan_shrink, plans.plan_expand),
    MoEPath.ONE_SHOT: (plans.plan_one_shot,),
    MoEPath.SMALL_BATCH: (plans.plan_small_batch,),
}
_GROUPS = yaml.safe_load(_FILE.read_text())["groups"]
_BOUNDARIES = _GROUPS["moe_boundaries"]["rows"]
_AXES = ("tokens", "rank", "slots")


@dataclass(frozen=True, slots=True)
class _Way:
    """All that decides how the kernels of a point are launched, but its sizes. What a path does
    not read is None: a case that takes it says nothing about that."""

    path: MoEPath
    plan: tuple[object, ...]
    height: int | None = None
    # what the alignment takes: several launches, plain torch
    is_large: bool | None = None
    has_many_bins: bool | None = None


def _ways(row: dict[str, Any], wanted: str | None) -> list[_Way]:
    """Of the points of a row, neighbours side by side."""
    axes = [row[axis] if isinstance(row[axis], list) else [row[axis]] for axis in _AXES]
    points = (row | dict(zip(_AXES, point, strict=True)) for point in itertools.product(*axes))
    return [_way(point, wanted) for point in points]


def _way(row: dict[str, Any], wanted: str | None) -> _Way:
    pairs = row["tokens"] * row["top_k"]
    itemsize = 4 if row["dtype"] == "fp32" else 2
    widths = tuple(row["slices"])
    shape = MoEShape(pairs, row["experts"], row["in_features"], widths, row["rank"], itemsize)
    path = plan_path(shape, MoEPath[wanted.upper()] if wanted else None)
    plan = tuple(planner(shape) for planner in _PLANNERS[path])
    if path is MoEPath.SMALL_BATCH:
        return _Way(path, plan)
    bins = num_bins(row["experts"], row["slots"], with_base=False)
    align = DEFAULT.align
    is_large, has_many_bins = pairs > align.single_launch_pairs, bins > align.most_bins
    return _Way(path, plan, shape.height, is_large, has_many_bins)


def _paths(row: dict[str, Any]) -> list[str | None]:
    given = row.get("path")
    return given if isinstance(given, list) else [given]


def _steps() -> set[tuple[str, object, object]]:
    """(what, before, after) of all neighbours of all rows."""
    return {
        (field.name, getattr(left, field.name), getattr(right, field.name))
        for row in _BOUNDARIES
        for path in _paths(row)
        for left, right in itertools.pairwise(_ways(row, path))
        for field in fields(_Way)
    }


@pytest.mark.parametrize("row", _BOUNDARIES, ids=str)
def test_neighbours_of_a_boundary_row_are_launched_in_different_ways(row: dict[str, Any]) -> None:
    for path in _paths(row):
        assert len(set(_ways(row, path))) > 1


@pytest.mark.parametrize(
    "step",
    [
        ("path", MoEPath.SMALL_BATCH, MoEPath.TWO_KERNEL),
        ("path", MoEPath.TWO_KERNEL, MoEPath.ONE_SHOT),
        ("path", MoEPath.ONE_SHOT, MoEPath.TWO_KERNEL),
        ("height", 16, 32),
        ("height", 32, 64),
        ("is_large", False, True),
        ("has_many_bins", False, True),
    ],
    ids=str,
)
def test_some_row_stands_at_each_kind_of_change(step: tuple[str, object, object]) -> None:
    assert step in _steps()


def test_some_row_stands_where_a_shrink_gets_more_splits() -> None:
    shrinks = [
        (left[0], right[0])
        for what, left, right in _steps()
        if what == "plan" and isinstance(left, tuple) and isinstance(right, tuple)
    ]
    assert any(
        left.splits < right.splits
        for left, right in shrinks
        if isinstance(left, plans.ShrinkPlan) and isinstance(right, plans.ShrinkPlan)
    )


def test_smoke_meets_high_tiles_on_both_paths_that_read_them_and_both_alignments() -> None:
    rows = _GROUPS["moe_small_tall"]["rows"]
    ways = [way for row in rows for path in _paths(row) for way in _ways(row, path)]
    assert {(way.path, way.height) for way in ways} == {
        (MoEPath.ONE_SHOT, 32),
        (MoEPath.TWO_KERNEL, 32),
        (MoEPath.ONE_SHOT, 64),
        (MoEPath.TWO_KERNEL, 64),
    }
    assert {way.is_large for way in ways} == {True, False}
