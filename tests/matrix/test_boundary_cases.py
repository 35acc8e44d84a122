"""The boundary rows of moe_delta lie where lorakernels changes how it launches; tuning a plan moves
these boundaries."""

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
from lorakernels.moe.tiles import Alignment, plan_alignment

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
class _Launch:
    """All that determines how the kernels of a point are launched, except its sizes. None for what
    its path does not read."""

    path: MoEPath
    plan: tuple[object, ...]
    height: int | None = None
    # of the pairs
    way: Alignment | None = None


def _launches(row: dict[str, Any], wanted: str | None) -> list[_Launch]:
    """How each point of a row is launched, in the order of the row."""
    axes = [row[axis] if isinstance(row[axis], list) else [row[axis]] for axis in _AXES]
    points = (row | dict(zip(_AXES, point, strict=True)) for point in itertools.product(*axes))
    return [_launch(point, wanted) for point in points]


def _launch(row: dict[str, Any], wanted: str | None) -> _Launch:
    pairs = row["tokens"] * row["top_k"]
    itemsize = 4 if row["dtype"] == "fp32" else 2
    widths = tuple(row["slices"])
    shape = MoEShape(pairs, row["experts"], row["in_features"], widths, row["rank"], itemsize)
    path = plan_path(shape, MoEPath[wanted.upper()] if wanted else None)
    plan = tuple(planner(shape) for planner in _PLANNERS[path])
    if path is MoEPath.SMALL_BATCH:
        return _Launch(path, plan)
    way = plan_alignment(pairs, row["experts"], row["slots"], with_base=False)
    return _Launch(path, plan, shape.height, way)


def _paths(row: dict[str, Any]) -> list[str | None]:
    given = row.get("path")
    return given if isinstance(given, list) else [given]


def _steps() -> set[tuple[str, object, object]]:
    """(what changes, before, after) between neighbours in all rows."""
    return {
        (field.name, getattr(left, field.name), getattr(right, field.name))
        for row in _BOUNDARIES
        for path in _paths(row)
        for left, right in itertools.pairwise(_launches(row, path))
        for field in fields(_Launch)
    }


@pytest.mark.parametrize("row", _BOUNDARIES, ids=str)
def test_neighbours_of_a_boundary_row_are_launched_in_different_ways(row: dict[str, Any]) -> None:
    for path in _paths(row):
        assert len(set(_launches(row, path))) > 1


@pytest.mark.parametrize(
    "step",
    [
        ("path", MoEPath.SMALL_BATCH, MoEPath.TWO_KERNEL),
        ("path", MoEPath.TWO_KERNEL, MoEPath.ONE_SHOT),
        ("path", MoEPath.ONE_SHOT, MoEPath.TWO_KERNEL),
        ("height", 16, 32),
        ("height", 32, 64),
        ("way", Alignment.SORTED_AT_ONCE, Alignment.COMPARED),
        ("way", Alignment.COMPARED, Alignment.COUNTED),
        ("way", Alignment.COUNTED, Alignment.SORTED),
    ],
    ids=str,
)
def test_some_row_crosses_each_kind_of_boundary(step: tuple[str, object, object]) -> None:
    assert step in _steps()


def test_some_row_crosses_the_boundary_to_more_splits_of_a_shrink() -> None:
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


def test_smoke_covers_high_tiles_on_both_paths_that_read_them_of_few_and_of_many_pairs() -> None:
    rows = _GROUPS["moe_small_tall"]["rows"]
    launches = [launch for row in rows for path in _paths(row) for launch in _launches(row, path)]
    assert {(launch.path, launch.height) for launch in launches} == {
        (MoEPath.ONE_SHOT, 32),
        (MoEPath.TWO_KERNEL, 32),
        (MoEPath.ONE_SHOT, 64),
        (MoEPath.TWO_KERNEL, 64),
    }
    ways = {launch.way for launch in launches}
    assert ways == {Alignment.SORTED_AT_ONCE, Alignment.COUNTED}
