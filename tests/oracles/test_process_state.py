"""A subject leaves settings that all code of a server shares as they were."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from loragate.core.machine import Machine
from loragate.matrix.case import Case, Dtype, Site
from loragate.protocol import BaseLayer, BrokenProtocol, CheckedSubject, Instance, Pool
from loragate.subjects.torch.subject import DenseDelta, TorchSubject

CASE = Case(
    site=Site.DENSE_DELTA,
    tokens=4,
    in_features=8,
    slices=(8,),
    rank=2,
    slots=2,
    dtype=Dtype.FP32,
)
CHANGES = {
    "torch.is_grad_enabled": lambda: torch.set_grad_enabled(not torch.is_grad_enabled()),
    "torch.get_default_dtype": lambda: torch.set_default_dtype(torch.float64),
    "torch.get_default_device": lambda: torch.set_default_device("meta"),
    "torch.get_num_threads": lambda: torch.set_num_threads(torch.get_num_threads() + 1),
    "the precision of fp32 products": lambda: torch.set_float32_matmul_precision("medium"),
    "autocast on the host": lambda: torch.set_autocast_enabled("cpu", True),
    "autocast on a GPU": lambda: torch.set_autocast_enabled("cuda", True),
    "torch.use_deterministic_algorithms": lambda: torch.use_deterministic_algorithms(
        not torch.are_deterministic_algorithms_enabled()
    ),
    "torch.set_flush_denormal": lambda: torch.set_flush_denormal(True),
    "torch's random generator": lambda: torch.manual_seed(5),
    "Python's random generator": lambda: random.seed(5),
}


@pytest.fixture(autouse=True)
def precision() -> Iterator[None]:
    matmul = torch.backends.cuda.matmul
    before, of_host = matmul.fp32_precision, torch.backends.mkldnn.matmul.fp32_precision
    yield
    matmul.fp32_precision = before
    torch.backends.mkldnn.matmul.fp32_precision = of_host


def _instance(machine: Machine, own: type[DenseDelta]) -> Instance:
    class Subject(TorchSubject):
        def open(self, case: Case, machine: Machine, base: BaseLayer | None) -> Instance:
            return own(case)

    return CheckedSubject(Subject()).open(CASE, machine, None)


def _state() -> tuple[object, ...]:
    return (
        torch.is_grad_enabled(),
        torch.get_default_dtype(),
        torch.get_default_device(),
        torch.get_num_threads(),
        torch.backends.cuda.matmul.fp32_precision,
        torch.is_autocast_enabled("cpu"),
        torch.is_autocast_enabled("cuda"),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        float(torch.tensor(1e-40)) == 0,
        torch.get_rng_state().tolist(),
        random.getstate(),
    )


@pytest.mark.parametrize("name", CHANGES)
def test_a_step_that_changes_a_setting_breaks_the_protocol_and_nothing_stays_changed(
    cpu: Machine, name: str
) -> None:
    class Changes(DenseDelta):
        def apply(self, x: Tensor, out: Tensor) -> Tensor:
            result = super().apply(x, out)
            CHANGES[name]()
            return result

    instance, before = _instance(cpu, Changes), _state()
    instance.prepare(torch.zeros(2, dtype=torch.int32))
    with pytest.raises(BrokenProtocol, match=f"apply left {name}") as caught:
        instance.apply(torch.zeros(2, 8), torch.zeros(2, 8))
    assert " and " not in str(caught.value)
    assert _state() == before


@pytest.mark.parametrize("method", ["load", "unload", "prepare"])
def test_each_method_is_held_to_it(cpu: Machine, method: str) -> None:
    class Changes(DenseDelta):
        def load(self, slot: int, pool: Pool) -> None:
            torch.set_default_dtype(torch.float64)

        def unload(self, slot: int) -> None:
            torch.set_default_dtype(torch.float64)

        def prepare(self, token_slots: Tensor) -> None:
            torch.set_default_dtype(torch.float64)

    instance = _instance(cpu, Changes)
    pool = Pool(torch.zeros(2, 1, 2, 8), (torch.zeros(2, 8, 2),), ((2,), (2,)), ((1.0,), (1.0,)))
    calls: dict[str, Callable[[], object]] = {
        "load": lambda: instance.load(0, pool),
        "unload": lambda: instance.unload(0),
        "prepare": lambda: instance.prepare(torch.zeros(2, dtype=torch.int32)),
    }
    with pytest.raises(BrokenProtocol, match=f"{method} left torch.get_default_dtype"):
        calls[method]()


def test_an_instance_that_changes_a_setting_when_it_is_opened_breaks_the_protocol(
    cpu: Machine,
) -> None:
    class Changes(DenseDelta):
        def __init__(self, case: Case) -> None:
            super().__init__(case)
            torch.set_default_dtype(torch.float64)

    before = _state()
    with pytest.raises(BrokenProtocol, match=r"open left torch\.get_default_dtype"):
        _instance(cpu, Changes)
    assert _state() == before


def test_a_loader_may_draw_numbers_and_a_step_may_not(cpu: Machine) -> None:
    class Draws(DenseDelta):
        def load(self, slot: int, pool: Pool) -> None:
            torch.nn.Linear(2, 2)

        def prepare(self, token_slots: Tensor) -> None:
            torch.nn.Linear(2, 2)

    instance = _instance(cpu, Draws)
    instance.load(0, Pool(torch.zeros(2, 1, 2, 8), (torch.zeros(2, 8, 2),), ((2,),), ((1.0,),)))
    with pytest.raises(BrokenProtocol, match="prepare left torch's random generator"):
        instance.prepare(torch.zeros(2, dtype=torch.int32))


def test_a_precision_that_the_older_function_cannot_name_is_no_error(cpu: Machine) -> None:
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    instance = _instance(cpu, DenseDelta)
    instance.prepare(torch.full((2,), -1, dtype=torch.int32))
    assert not instance.apply(torch.zeros(2, 8), torch.zeros(2, 8)).any()


def test_what_fails_in_between_is_the_error_that_the_caller_gets(cpu: Machine) -> None:
    class Fails(DenseDelta):
        def apply(self, x: Tensor, out: Tensor) -> Tensor:
            torch.set_default_dtype(torch.float64)
            raise ValueError("of the subject")

    instance, before = _instance(cpu, Fails), _state()
    with pytest.raises(ValueError, match="of the subject"):
        instance.apply(torch.zeros(2, 8), torch.zeros(2, 8))
    assert _state() == before


def test_a_result_that_is_a_part_of_the_base_layer_breaks_the_protocol(cpu: Machine) -> None:
    class Views:
        def __init__(self, base: BaseLayer) -> None:
            self.base = base

        def load(self, slot: int, pool: Pool) -> None: ...

        def unload(self, slot: int) -> None: ...

        def prepare(self, token_slots: Tensor) -> None: ...

        def apply(self, x: Tensor, out: Tensor) -> Tensor:
            return self.base.weight[2:3]

    class Subject(TorchSubject):
        def open(self, case: Case, machine: Machine, base: BaseLayer | None) -> Instance:
            assert base is not None
            return Views(base)

    base = BaseLayer(torch.zeros(8, 8), None)
    case = Case(
        site=Site.EMBEDDING,
        tokens=1,
        in_features=8,
        slices=(8,),
        rank=2,
        slots=2,
        dtype=Dtype.FP32,
    )
    instance = CheckedSubject(Subject()).open(case, cpu, base)
    wanted = "returned a view of the weight of the base layer; expected a tensor of its own"
    with pytest.raises(BrokenProtocol, match=wanted):
        instance.apply(torch.tensor([[2]]), torch.zeros(1, 8))
