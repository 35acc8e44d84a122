"""The boundary rows of experts stand where lorakernels takes another way; plans move when they are
tuned."""

from __future__ import annotations

import itertools
import pathlib
from dataclasses import dataclass
from typing import Any

import pytest
import yaml

pytest.importorskip("triton", reason="lorakernels needs triton")

from lorakernels.moe import plan as plans
from lorakernels.moe.align_launch import MOST_BINS, SMALL
from lorakernels.moe.plan import MoEPath, MoEShape, plan_path
from lorakernels.moe.tiles import num_bins

_FILE = pathlib.Path(__file__).parents[2] / "cases" / "moe_delta.yaml"
_PLANNERS = {
    MoEPath.TWO_KERNEL: (plans.plan_shrink, plans.plan_expand),
    MoEPath.ONE_SHOT: (plans.plan_one_shot,),
    MoEPath.SMALL_BATCH: (plans.plan_small_batch,),
}
_GROUPS = yaml.safe_load(_FILE.read_text())["groups"]
_SMALL = _GROUPS["moe_small_boundaries"]["rows"]
_NEIGHBOURS = [
    row
    for row in _SMALL + _GROUPS["moe_boundaries"]["rows"]
    if any(isinstance(row[key], list) for key in ("tokens", "rank", "slots"))
]


@dataclass(frozen=True, slots=True)
class _Way:
    """All that decides how the kernels of a point are launched, but its sizes."""

    path: MoEPath
    height: int
    plan: tuple[object, ...]
    # what the alignment takes: several launches, plain torch
    is_large: bool
    has_many_bins: bool


def _ways(row: dict[str, Any]) -> set[_Way]:
    listed = {key: row[key] for key in ("tokens", "rank", "slots") if isinstance(row[key], list)}
    points = (
        row | dict(zip(listed, point, strict=True)) for point in itertools.product(*listed.values())
    )
    return {_way(point, path) for point in points for path in _paths(row)}


def _paths(row: dict[str, Any]) -> list[MoEPath | None]:
    return [MoEPath[path.upper()] for path in row.get("path", [])] or [None]


def _way(row: dict[str, Any], wanted: MoEPath | None) -> _Way:
    pairs = row["tokens"] * row["top_k"]
    itemsize = 4 if row["dtype"] == "fp32" else 2
    widths = tuple(row["slices"])
    shape = MoEShape(pairs, row["experts"], row["in_features"], widths, row["rank"], itemsize)
    path = plan_path(shape, wanted)
    chosen = tuple(planner(shape) for planner in _PLANNERS[path])
    bins = num_bins(row["experts"], row["slots"], with_base=False)
    return _Way(path, shape.height, chosen, pairs > SMALL, bins > MOST_BINS)


@pytest.mark.parametrize("row", _NEIGHBOURS, ids=str)
def test_neighbours_of_a_boundary_row_are_launched_in_different_ways(row: dict[str, Any]) -> None:
    assert len(_ways(row)) > len(_paths(row))


def test_smoke_meets_every_height_of_tiles_and_both_alignments() -> None:
    ways = [way for row in _SMALL for way in _ways(row)]
    assert {way.height for way in ways} == {16, 32, 64}
    assert {way.is_large for way in ways} == {True, False}
