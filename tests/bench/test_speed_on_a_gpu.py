"""The processes of two builds on a real GPU. What they measure is not asserted."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from loragate.bench.kinds import KINDS
from loragate.bench.speed.comparing import Request, compare_builds
from loragate.core.machine import detect_machine

ROWS = {
    "dense": ("down.m1.r16", "qkv.m64.r16"),
    "moe": ("mixtral.m16.r16", "align.m64"),
    "streams": ("gdn.qwen3_next.none.m16",),
}
CALLS = {"dense": ("delta", "base and delta")}


def test_the_rows_are_those_of_the_tables() -> None:
    for name, rows in ROWS.items():
        kind = KINDS[name]
        table = kind.rows() if kind.default_seed is None else kind.rows(0)
        assert set(rows) <= {row.id for row in table}


@pytest.mark.skipif(detect_machine().device != "cuda", reason="needs a GPU, which alone is timed")
@pytest.mark.parametrize("kind", ROWS)
def test_equal_builds_are_timed_call_by_call_and_have_equal_resources(kind: str) -> None:
    spec = importlib.util.find_spec("lorakernels")
    assert spec is not None
    assert spec.origin is not None
    present = str(Path(spec.origin).parents[1])
    seed = None if KINDS[kind].default_seed is None else 0
    lines: list[str] = []
    request = Request(kind, ROWS[kind], seed, present)
    figures = compare_builds(request, detect_machine(), lines.append)
    measured = {item.row for item in figures.comparisons}
    assert measured == set(request.rows), lines
    assert all(item.before_us > 0 and item.now_us > 0 for item in figures.comparisons)
    assert all(item.low <= item.ratio <= item.high for item in figures.comparisons)
    if kind in CALLS:
        assert {item.call for item in figures.comparisons} == set(CALLS[kind])
    assert figures.resources.problem == ""
    assert len(figures.resources.kernels) > 100
    assert figures.resources.changed == ()
