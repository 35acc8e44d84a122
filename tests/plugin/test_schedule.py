"""Which legs run beside which, and on how many cores."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from loragate.core.gpus import HOST_BUDGET_BYTES, ListedGpu
from loragate.matrix.case import Tier
from loragate.matrix.selection import Selection
from loragate.run import schedule
from loragate.run.legs import GateSetup, Leg, Needs, legs_of
from loragate.run.schedule import describe, spare_cores, stages

_GIB = 1 << 30
SPARE = frozenset({4, 5})
LARGE, SMALL = 140 * _GIB, 40 * _GIB


def names(legs: tuple[Leg, ...], spare: frozenset[int] = SPARE) -> list[list[list[str]]]:
    """Of the legs in each lane of each stage that has any."""
    found = [[[leg.name for leg in lane.legs] for lane in stage] for stage in stages(legs, spare)]
    return [stage for stage in found if any(stage)]


def legs_of_gate(*subjects: str, has_gpu: bool, speed: str | None = None) -> tuple[Leg, ...]:
    selection = Selection(matrix=(), subjects=subjects, tier=Tier.SMOKE)
    report = Path("report")
    setup = GateSetup(run="r", report=report, selection=selection, has_gpu=has_gpu)
    return legs_of(replace(setup, speed_against=speed))


def test_what_needs_no_gpu_runs_beside_the_cases_and_what_is_timed_runs_after_all() -> None:
    legs = legs_of_gate("lorakernels", "vllm", has_gpu=True, speed="v1")
    beside, timed = [["gpu"], ["compile", "host", "findings"]], [["speed-dense", "speed-moe"]]
    assert names(legs) == [beside, timed]
    (first, _) = stages(legs, SPARE)
    assert [lane.cores for lane in first] == [frozenset(), SPARE]
    lanes = "gpu; compile, then host, then findings"
    assert describe(first) == f"side by side: {lanes} (on 2 cores)"


@pytest.mark.parametrize(
    ("legs", "spare"),
    [
        (legs_of_gate("lorakernels", "vllm", has_gpu=True, speed="v1"), frozenset[int]()),
        (legs_of_gate("lorakernels", has_gpu=False), SPARE),
        (legs_of_gate("torch", has_gpu=True, speed="v1"), SPARE),
    ],
    ids=["no spare core", "no GPU", "no leg without the GPU"],
)
def test_otherwise_legs_run_one_after_the_other_in_the_order_of_the_report(
    legs: tuple[Leg, ...], spare: frozenset[int]
) -> None:
    assert len(legs) > 1
    assert names(legs, spare) == [[[leg.name for leg in legs]]]
    (stage,) = stages(legs, spare)
    assert not stage[0].cores
    assert describe(stage) == ""


def test_the_cases_without_a_gpu_have_all_cores_to_themselves() -> None:
    (cases, *_) = legs_of_gate("lorakernels", has_gpu=False)
    assert (cases.name, cases.needs) == ("interpreter", Needs.CORES)


@pytest.mark.parametrize(
    ("cores", "gpus", "host_gib", "left"),
    [
        # what is left: of all cores but one, those that are not of the 14 workers
        (24, [LARGE], 100, 9),
        (20, [LARGE], 100, 5),
        # a quarter of the cores where less is left
        (19, [LARGE], 100, 4),
        (16, [LARGE], 100, 4),
        # two GPUs have the workers of two
        (16, [LARGE, LARGE], 100, 4),
        (40, [LARGE, LARGE], 100, 11),
        (32, [LARGE, LARGE], 100, 8),
        # one core is too few to gain anything
        (8, [LARGE], 100, 2),
        (7, [LARGE], 100, 0),
        (2, [LARGE], 100, 0),
        # a worker needs memory of the host as well: with 16 of them beside each other it is full
        (16, [LARGE], 17 * HOST_BUDGET_BYTES / _GIB, 3),
        (16, [LARGE], 16 * HOST_BUDGET_BYTES / _GIB, 2),
        (16, [LARGE], 15 * HOST_BUDGET_BYTES / _GIB, 0),
        # what the workers leave of a small GPU is too little for tests that use it beside them
        (16, [SMALL], 100, 0),
        (32, [LARGE, SMALL], 100, 0),
        # unknown
        (16, [0], 100, 0),
        (16, [], 100, 0),
    ],
)
def test_legs_beside_the_cases_get_the_cores_that_are_left_or_a_quarter_of_all(
    monkeypatch: pytest.MonkeyPatch, cores: int, gpus: list[int], host_gib: float, left: int
) -> None:
    machine(monkeypatch, cores, gpus, host_gib)
    # the last ones, of those that this process may use
    assert spare_cores() == frozenset(range(100 + cores - left, 100 + cores))


def test_nothing_runs_beside_workers_that_the_caller_has_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine(monkeypatch, 16, [LARGE], 100)
    assert spare_cores()
    monkeypatch.setenv("PYTEST_XDIST_AUTO_NUM_WORKERS", "12")
    assert not spare_cores()


@pytest.mark.parametrize("hidden", [LARGE, SMALL])
def test_a_gpu_that_is_not_visible_has_no_workers(
    hidden: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(monkeypatch, 16, [hidden, LARGE], 100)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert len(spare_cores()) == 4


def machine(monkeypatch: pytest.MonkeyPatch, cores: int, gpus: list[int], host_gib: float) -> None:
    listed = tuple(ListedGpu(str(n), f"GPU-{n}", free) for n, free in enumerate(gpus))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("PYTEST_XDIST_AUTO_NUM_WORKERS", raising=False)
    monkeypatch.setattr(schedule, "list_gpus", lambda environ: listed)
    monkeypatch.setattr(schedule, "usable_cores", lambda: cores)
    monkeypatch.setattr(schedule, "free_host_bytes", lambda: int(host_gib * _GIB))
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(100, 100 + cores)))
