"""Exchanges between ranks: simulated in one process, and over torch.distributed in several."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lorakernels.runtime.collectives import (
    Collective,
    SimulatedRanks,
    collective_of,
    number_of,
)

PROCESS = Path(__file__).with_name("rank_of_a_group.py")


def gathered(group: Collective, part: Tensor) -> Tensor:
    out = torch.empty(group.size, *part.shape)
    group.all_gather(part, out)
    return out


def test_parts_are_gathered_in_the_order_of_the_ranks() -> None:
    ranks = SimulatedRanks(3)
    calls = [
        lambda rank=rank: gathered(ranks.rank(rank), torch.full((2,), float(rank)))
        for rank in range(3)
    ]
    for out in ranks.run(calls):
        assert out.tolist() == [[0, 0], [1, 1], [2, 2]]


def test_a_group_keeps_its_number_and_shares_it_with_no_other() -> None:
    ranks = SimulatedRanks(2)
    first, second = ranks.rank(0), ranks.rank(1)
    numbers = [number_of(group) for group in (first, second, first, second)]
    assert numbers[:2] == numbers[2:]
    assert numbers[0] != numbers[1]
    assert collective_of(numbers[1]) is second


def test_a_sum_is_that_of_all_ranks_and_in_place() -> None:
    ranks, values = SimulatedRanks(2), [torch.tensor([1.0, 2.0]), torch.tensor([10.0, 20.0])]
    ranks.run([lambda r=r, v=v: ranks.rank(r).all_reduce(v) for r, v in enumerate(values)])
    assert [value.tolist() for value in values] == [[11, 22], [11, 22]]


def test_an_exchange_may_use_what_an_earlier_one_gave() -> None:
    ranks = SimulatedRanks(2)

    def call(rank: int) -> Tensor:
        total = torch.tensor([rank + 1.0])
        ranks.rank(rank).all_reduce(total)
        return gathered(ranks.rank(rank), total * (rank + 1))

    for _ in range(2):
        first, second = ranks.run([lambda: call(0), lambda: call(1)])
        assert first.tolist() == second.tolist() == [[3], [6]]


def test_what_a_rank_brings_is_kept_while_the_next_rank_uses_its_buffer() -> None:
    ranks, buffer = SimulatedRanks(2), torch.empty(1)

    def call(rank: int) -> Tensor:
        buffer.fill_(rank)
        return gathered(ranks.rank(rank), buffer)

    for out in ranks.run([lambda: call(0), lambda: call(1)]):
        assert out.tolist() == [[0], [1]]


def nothing() -> None:
    pass


def test_ranks_that_come_to_different_exchanges_are_refused() -> None:
    ranks = SimulatedRanks(2)

    def gather(width: int) -> Callable[[], object]:
        return lambda: gathered(ranks.rank(0), torch.zeros(width))

    def reduce() -> None:
        ranks.rank(1).all_reduce(torch.zeros(2))

    with pytest.raises(ValueError, match=r"same exchange \(got .*GATHER.*REDUCE"):
        ranks.run([gather(2), reduce])
    with pytest.raises(ValueError, match=r"same exchange \(got .*\[\]\]"):
        ranks.run([gather(2), nothing])
    for number in (1, 3):
        with pytest.raises(ValueError, match=rf"one for each of 2 ranks \(got {number}\)"):
            ranks.run([nothing] * number)
    with pytest.raises(ValueError, match=r"size must be at least 1 \(got 0\)"):
        SimulatedRanks(0)


def test_ranks_that_bring_tensors_of_different_dtypes_are_refused() -> None:
    ranks = SimulatedRanks(2)

    def call(rank: int, dtype: torch.dtype) -> Tensor:
        total = torch.ones(2, dtype=dtype)
        ranks.rank(rank).all_reduce(total)
        return total

    # what a process group does with them is undefined
    with pytest.raises(ValueError, match=r"one dtype \(got \[torch.bfloat16, torch.float32\]\)"):
        ranks.run([lambda: call(0, torch.bfloat16), lambda: call(1, torch.float32)])
    with pytest.raises(ValueError, match="one dtype"):
        ranks.run([lambda: call(0, torch.float32), lambda: call(1, torch.bfloat16)])
    assert ranks.run([lambda: call(0, torch.bfloat16), lambda: call(1, torch.bfloat16)])


def test_a_run_that_failed_behind_an_exchange_leaves_no_answers_to_the_next_one() -> None:
    ranks = SimulatedRanks(2)

    def call(rank: int, *, fails: bool) -> Tensor:
        out = gathered(ranks.rank(rank), torch.tensor([rank + (10.0 if fails else 0.0)]))
        if fails:
            raise RuntimeError("device lost")
        return out

    with pytest.raises(RuntimeError, match="device lost"):
        ranks.run([lambda: call(0, fails=True), lambda: call(1, fails=True)])
    for out in ranks.run([lambda: call(0, fails=False), lambda: call(1, fails=False)]):
        assert out.tolist() == [[0], [1]]


def run_processes(backend: str, size: int, store: Path, environment: dict[str, str]) -> None:
    commands = [
        [sys.executable, str(PROCESS), backend, str(rank), str(size), str(store)]
        for rank in range(size)
    ]
    processes = [
        subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
        for command in commands
    ]
    try:
        errors = [process.communicate(timeout=300)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    failed = [error for process, error in zip(processes, errors, strict=True) if process.returncode]
    assert not failed, "\n".join(failed)


def test_two_processes_share_the_adapters_of_a_layer(tmp_path: Path) -> None:
    path = os.pathsep.join(sys.path)
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    run_processes("gloo", 2, tmp_path / "store", environment)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_share_the_adapters_of_a_layer_also_in_a_graph(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    environment.pop("TRITON_INTERPRET", None)
    run_processes("nccl", 2, tmp_path / "store", environment)
