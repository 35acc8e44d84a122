"""Races through addresses that a kernel loads: found if declared, otherwise the table is named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from loragate.core.machine import Machine, detect_machine
from loragate.core.verdict import Failure, OracleName, Verdict
from loragate.matrix.case import Case, Mix, Site, Streams
from loragate.oracles import ORACLES
from loragate.protocol import BaseLayer, Capabilities, Instance, Pool, Trial
from loragate.subjects.torch.subject import TorchSubject

HERE = detect_machine()


@triton.jit
def move_kernel(from_table_ptr, to_table_ptr, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    source = tl.load(from_table_ptr).to(tl.pointer_type(tl.float32))
    target = tl.load(to_table_ptr).to(tl.pointer_type(tl.float32))
    offsets = tl.arange(0, SIZE)
    tl.store(target + offsets, tl.load(source + offsets))


@triton.jit
def move_by_value_kernel(source, to_ptr, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    offsets = tl.arange(0, SIZE)
    # a small address would be a number of 32 bits
    source_ptr = source.to(tl.int64).to(tl.pointer_type(tl.float32))
    tl.store(to_ptr + offsets, tl.load(source_ptr + offsets))


class ThroughTables:
    """Both streams use one buffer, and only kernels that load its address know it."""

    joins = True

    def __init__(self, case: Case, base: BaseLayer) -> None:
        self.base, device = base, base.weight.device
        self.side = torch.cuda.Stream() if case.streams is Streams.DUAL else None
        self.hidden, self.source, self.target = (torch.ones(8, device=device) for _ in range(3))
        self.tables = {
            tensor: torch.tensor([tensor.data_ptr()], device=device)
            for tensor in (self.hidden, self.source, self.target)
        }

    def behind(self, table: Tensor) -> list[Tensor]:
        return [tensor for tensor, own in self.tables.items() if own is table]

    def load(self, slot: int, pool: Pool) -> None: ...

    def unload(self, slot: int) -> None: ...

    def prepare(self, token_slots: Tensor) -> None: ...

    def apply(self, x: Tensor, out: Tensor) -> Tensor:
        side = self.side
        assert side is not None
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            move_kernel[(1,)](self.tables[self.source], self.tables[self.hidden], SIZE=8)
        if self.joins:
            torch.cuda.current_stream().wait_stream(side)
        self.read()
        torch.cuda.current_stream().wait_stream(side)
        return functional.linear(x, self.base.weight, self.base.bias)

    def read(self) -> None:
        move_kernel[(1,)](self.tables[self.hidden], self.tables[self.target], SIZE=8)


class WithoutJoin(ThroughTables):
    joins = False


class ByValue(ThroughTables):
    def read(self) -> None:
        move_by_value_kernel[(1,)](self.hidden.data_ptr(), self.target, SIZE=8)


BOTH = {("move_kernel", name): ThroughTables.behind for name in ("from_table_ptr", "to_table_ptr")}


class Subject(TorchSubject):
    def __init__(self, layer: type[ThroughTables], declared: tuple[str, ...]) -> None:
        self.layer = layer
        self.tables = {key: function for key, function in BOTH.items() if key[1] in declared}

    def capabilities(self, machine: Machine) -> Capabilities:
        have = super().capabilities(machine)
        assert not isinstance(have, str)
        supports = {**have.supports, "streams": frozenset({Streams.DUAL})}
        return replace(have, supports=supports, pointer_tables=self.tables)

    def open(self, case: Case, machine: Machine, base: BaseLayer | None) -> Instance:
        assert base is not None
        return self.layer(case, base)


@pytest.fixture
def trial(make_trial: Callable[..., Trial]) -> Callable[..., Trial]:
    def trial(layer: type[ThroughTables], *declared: str) -> Trial:
        made = make_trial(site=Site.LORA_LINEAR, streams=Streams.DUAL, mix=Mix.SHUFFLED)
        subject = Subject(layer, declared)
        have = subject.capabilities(HERE)
        return replace(made, machine=HERE, subject=subject, capabilities=have)

    return trial


RACE = ORACLES[OracleName.RACE]


def test_a_race_through_declared_tables_is_found(trial: Callable[..., Trial]) -> None:
    declared = ("from_table_ptr", "to_table_ptr")
    judgement = RACE.judge(trial(WithoutJoin, *declared))
    assert judgement.failure is Failure.RACE
    assert "(behind to_table_ptr / behind from_table_ptr)" in judgement.message
    assert RACE.judge(trial(ThroughTables, *declared)).verdict is Verdict.PASS


@pytest.mark.parametrize(
    ("declared", "named"),
    [
        ((), "move_kernel: from_table_ptr, to_table_ptr)"),
        (("from_table_ptr",), "move_kernel: to_table_ptr)"),
    ],
)
def test_an_argument_that_is_an_undeclared_table_is_named(
    declared: tuple[str, ...], named: str, trial: Callable[..., Trial]
) -> None:
    judgement = RACE.judge(trial(ThroughTables, *declared))
    assert judgement.verdict is Verdict.INCONCLUSIVE
    assert named in judgement.message


def test_an_address_that_is_given_as_a_number_is_named(trial: Callable[..., Trial]) -> None:
    judgement = RACE.judge(trial(ByValue))
    assert judgement.verdict is Verdict.INCONCLUSIVE
    assert "move_by_value_kernel: source" in judgement.message
