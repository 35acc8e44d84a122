"""Which GPUs workers get and how many workers there are."""

from __future__ import annotations

import pytest

from loragate.core.gpus import (
    GPU_BUDGET_BYTES,
    HOST_BUDGET_BYTES,
    ListedGpu,
    share_of_gpu,
    visible_gpus,
    worker_count,
    workers_per_gpu,
)

PLENTY = 1 << 50


def listed(*free_budgets: int) -> list[ListedGpu]:
    return [
        ListedGpu(str(index), f"GPU-{index}", budgets * GPU_BUDGET_BYTES)
        for index, budgets in enumerate(free_budgets)
    ]


@pytest.mark.parametrize(
    ("value", "handles"),
    [
        ("5,7", ("5", "7")),
        ("7, 5", ("7", "5")),
        ("GPU-abc,MIG-def", ("GPU-abc", "MIG-def")),
        ("", ()),
        ("-1", ()),
        ("2,-1,3", ("2",)),
    ],
)
def test_the_list_of_the_caller_is_taken_as_cuda_reads_it(value, handles):
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": value}, listed(1, 1, 1)) == handles


def test_without_a_list_every_gpu_is_visible_by_its_uuid():
    assert visible_gpus({}, listed(1, 1)) == ("GPU-0", "GPU-1")


def test_the_fullest_visible_gpu_bounds_the_workers_of_each():
    assert workers_per_gpu(["0", "1"], listed(9, 3, 0), 0) == 2


def test_no_gpu_gets_more_than_fourteen_workers_or_fewer_than_one():
    assert workers_per_gpu(["0"], listed(100), 0) == 14
    assert workers_per_gpu(["0"], listed(0), 0) == 1


def test_one_worker_at_a_time_has_memory_for_the_largest_case():
    assert workers_per_gpu(["0"], listed(9), 0) == 8
    assert workers_per_gpu(["0"], listed(9), 4 * GPU_BUDGET_BYTES) == 5
    assert workers_per_gpu(["0"], listed(9), 9 * GPU_BUDGET_BYTES) == 1


@pytest.mark.parametrize("budgets", [5, 9, 17, 40])
@pytest.mark.parametrize("largest", [0, GPU_BUDGET_BYTES, 3 * GPU_BUDGET_BYTES])
def test_shares_leave_memory_for_the_largest_case_and_add_up_to_less_than_the_gpu(budgets, largest):
    workers = workers_per_gpu(["0"], listed(budgets), largest)
    share = share_of_gpu(budgets * GPU_BUDGET_BYTES, workers, largest)
    assert share.own_bytes >= GPU_BUDGET_BYTES
    assert share.own_bytes + share.reserve_bytes >= largest
    assert workers * share.own_bytes + share.reserve_bytes <= 0.9 * budgets * GPU_BUDGET_BYTES


def test_workers_beyond_what_fits_still_get_memory_each():
    share = share_of_gpu(GPU_BUDGET_BYTES, 20, 2 * GPU_BUDGET_BYTES)
    assert share.own_bytes > 0
    assert 20 * share.own_bytes + share.reserve_bytes <= GPU_BUDGET_BYTES


def test_a_gpu_of_unknown_memory_gets_one_worker():
    assert workers_per_gpu(["MIG-def"], listed(9), 0) == 1


def test_each_gpu_has_its_workers_while_there_are_cores():
    assert worker_count(2, 4, cores=16, host_free_bytes=PLENTY) == 8
    assert worker_count(2, 4, cores=5, host_free_bytes=PLENTY) == 5


def test_no_gpu_stays_idle_for_lack_of_cores():
    assert worker_count(4, 2, cores=2, host_free_bytes=PLENTY) == 4


def test_without_a_gpu_there_is_a_worker_for_each_core_that_memory_allows():
    assert worker_count(0, 1, cores=8, host_free_bytes=PLENTY) == 8
    assert worker_count(0, 1, cores=8, host_free_bytes=3 * HOST_BUDGET_BYTES) == 3
    assert worker_count(0, 1, cores=8, host_free_bytes=0) == 1
