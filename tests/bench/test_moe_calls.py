from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from loragate.bench.moe_calls import PathwiseInstance, delta_calls
from loragate.core.machine import detect_machine, select_interpreter
from loragate.inputs import DataKind, make_batch, make_pool
from loragate.matrix.case import Case, Dtype, Path, Ranks, Site, Write
from loragate.protocol import Batch, Routes, Subject
from loragate.subjects.lorakernels.subject import LoraKernelsSubject
from loragate.subjects.vllm.subject import VllmSubject

select_interpreter()
CASE = Case(
    site=Site.MOE_DELTA,
    tokens=5,
    in_features=32,
    slices=(24, 24),
    rank=8,
    slots=2,
    dtype=Dtype.BF16,
    ranks=Ranks.FULL,
    experts=3,
    top_k=2,
)


TILED = (Path.ONE_SHOT, Path.SMALL_BATCH, Path.TWO_KERNEL)


class Recorder:
    """An instance that records its calls."""

    def __init__(self, log: list[str], path: Path = Path.PLAN) -> None:
        self.log, self.path = log, path

    def on_path(self, path: Path) -> Recorder:
        return Recorder(self.log, path)

    def assign(self, routes: Routes) -> str:
        self.log.append(f"assign {self.path}")
        return f"assigned {self.path}"

    def launch(self, x: Tensor, out: Tensor, routes: Routes, assignment: Any) -> Tensor:
        self.log.append(f"launch {self.path} on {assignment}")
        return out

    def apply(self, x: Tensor, out: Tensor, routes: Routes) -> Tensor:
        return self.launch(x, out, routes, self.assign(routes))


def calls_of(case: Case, log: list[str]) -> Any:
    rows = torch.empty(0)
    batch = Batch(rows, rows, rows, Routes(torch.zeros(5, 2, dtype=torch.int32)))
    have = VllmSubject.describe(interpreted=True, batch_invariant=False)
    return delta_calls(case, have, cast(PathwiseInstance, Recorder(log)), batch, TILED)


def test_a_launch_without_alignment_uses_the_one_that_was_made_before() -> None:
    log: list[str] = []
    calls = calls_of(CASE, log)
    assert log == ["assign one_shot", "assign small_batch", "assign two_kernel"]
    log.clear()
    calls[Path.TWO_KERNEL].launch()
    assert log == ["launch two_kernel on assigned two_kernel"]


def test_a_launch_with_alignment_aligns_each_time() -> None:
    log: list[str] = []
    calls = calls_of(CASE, log)
    log.clear()
    for _ in range(2):
        calls[Path.ONE_SHOT].aligned_launch()
    assert log == ["assign one_shot", "launch one_shot on assigned one_shot"] * 2


def test_a_path_that_cannot_take_the_case_is_left_out() -> None:
    assert list(calls_of(replace(CASE, rank=256), [])) == [Path.TWO_KERNEL]
    stored = list(calls_of(replace(CASE, write=Write.STORE), []))
    assert stored == [Path.ONE_SHOT, Path.SMALL_BATCH]


@pytest.mark.parametrize("subject", [LoraKernelsSubject(), VllmSubject()], ids=lambda s: s.name)
def test_every_call_on_an_installed_subject_adds_the_same_delta(subject: Subject) -> None:
    machine = detect_machine()
    have = subject.capabilities(machine)
    if isinstance(have, str) or (have.refuses and have.refuses(CASE)):
        pytest.skip(f"{subject.name} cannot run here")
    pool = make_pool(CASE, 3, DataKind.SIGNED, machine, have)
    batch = make_batch(CASE, 3, 0, DataKind.SIGNED, machine)
    instance = cast(PathwiseInstance, subject.open(CASE, machine, None))
    for slot in range(CASE.slots):
        instance.load(slot, pool)
    instance.prepare(batch.token_slots)
    before = batch.out.clone()
    deltas = []
    for calls in delta_calls(CASE, have, instance, batch, TILED).values():
        for call in (calls.launch, calls.aligned_launch):
            batch.out.copy_(before)
            deltas.append(call().float() - before.float())
    assert len(deltas) == 6
    assert deltas[0].any()
    for delta in deltas[1:]:
        torch.testing.assert_close(delta, deltas[0], atol=0.05, rtol=0.02)
