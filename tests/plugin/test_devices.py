"""Which GPUs workers get and how many workers there are."""

from __future__ import annotations

import pytest

from loragate.devices import (
    GPU_BUDGET_BYTES,
    HOST_BUDGET_BYTES,
    ListedGpu,
    parse_gpu_list,
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
    assert workers_per_gpu(["0", "1"], listed(9, 2, 0), 0) == 2


def test_no_gpu_gets_more_than_four_workers_or_fewer_than_one():
    assert workers_per_gpu(["0"], listed(100), 0) == 4
    assert workers_per_gpu(["0"], listed(0), 0) == 1


def test_every_worker_has_room_for_the_largest_case():
    assert workers_per_gpu(["0"], listed(9), 4 * GPU_BUDGET_BYTES) == 2


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


def test_the_answer_of_the_driver_is_read():
    text = "0, GPU-aaa, 143000\n1, GPU-bbb, [N/A]\n"
    assert parse_gpu_list(text) == (
        ListedGpu("0", "GPU-aaa", 143000 << 20),
        ListedGpu("1", "GPU-bbb", 0),
    )
