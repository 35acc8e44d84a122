"""The canary watches every tensor that a subject is given, whatever the site."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from loragate.core.machine import Machine
from loragate.core.verdict import Failure, OracleName, Verdict
from loragate.matrix.case import Bias, Case, ExpertMap, Mix, Quantisation, RouterWeights, Site
from loragate.oracles import ORACLES
from loragate.protocol import BaseLayer, Batch, Pool, Routes, Trial
from loragate.subjects.torch.subject import DenseDelta, TorchSubject

INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
EXPERTS: dict[str, Any] = {"experts": 4, "top_k": 2, "router": RouterWeights.OUTPUT}
LAYER = EXPERTS | {"site": Site.MOE_LAYER, "slices": (16, 16)}
SITES: dict[str, dict[str, Any]] = {
    "dense_delta": {"site": Site.DENSE_DELTA},
    "lora_linear": {"site": Site.LORA_LINEAR, "bias": Bias.PRESENT},
    "embedding": {"site": Site.EMBEDDING, "slices": (16,)},
    "moe_delta": EXPERTS | {"site": Site.MOE_DELTA, "expert_map": ExpertMap.PARALLEL},
    "moe_layer": LAYER | {"expert_bias": Bias.PRESENT},
    "quantised_layer": LAYER | {"quantisation": Quantisation.FP8},
}


def tensors_in(value: object, name: str) -> Iterator[tuple[str, Tensor]]:
    """All tensors that a dataclass holds, by where they are."""
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, tuple):
        for number, part in enumerate(value):
            yield from tensors_in(part, f"{name}[{number}]")
    elif is_dataclass(value):
        for field in fields(value):
            yield from tensors_in(getattr(value, field.name), f"{name}.{field.name}")


class ChangesOne(TorchSubject):
    """A right subject but for one element of tensor number `changed` of all that it was given;
    `names` are what it was given."""

    def __init__(self, changed: int) -> None:
        self.changed = changed
        self.names: list[str] = []

    def open(self, case: Case, machine: Machine, base: BaseLayer | None) -> Any:
        own: Any = super().open(case, machine, base)
        load, prepare, apply = own.load, own.prepare, own.apply
        pools: list[Pool] = []
        mappings: list[Tensor] = []

        def changing(x: Tensor, out: Tensor, *routes: Routes) -> Tensor:
            result: Tensor = apply(x, out, *routes)
            found = self.given(Batch(x, mappings[-1], out, *routes), pools[-1], base)
            self.names = [name for name, _ in found]
            self.change(found[self.changed % len(found)][1])
            return result

        own.load = lambda slot, pool: (pools.append(pool), load(slot, pool))
        own.prepare = lambda slots: (mappings.append(slots), prepare(slots))
        own.apply = changing
        return own

    def given(self, batch: Batch, pool: Pool, base: BaseLayer | None) -> list[tuple[str, Tensor]]:
        # without a base layer the delta is added to the output
        adds = base is None
        found = tensors_in((batch, pool, base), "")
        return [one for one in found if not (adds and one[1] is batch.out)]

    def change(self, values: Tensor) -> None:
        values.view(INTEGERS[values.element_size()])[(-1,) * values.dim()] += 1


@pytest.mark.parametrize("site", SITES)
def test_a_changed_element_of_any_tensor_fails(site: str, make_trial: Callable[..., Trial]) -> None:
    trial, number, names = make_trial(tokens=6, in_features=16, **SITES[site]), 0, [""]
    while number < len(names):
        subject = ChangesOne(number)
        judgement = ORACLES[OracleName.CANARY].judge(replace(trial, subject=subject))
        names = subject.names
        assert judgement.verdict is Verdict.FAIL, names[number]
        assert judgement.failure is Failure.FOREIGN_MEMORY
        assert judgement.message.startswith("the step changed 1 element of "), names[number]
        number += 1


class WritesBeside(ChangesOne):
    """A right subject but for one element ahead of, or behind, a tensor of a batch."""

    def __init__(self, changed: int, *, behind: bool) -> None:
        super().__init__(changed)
        self.behind = behind

    def given(self, batch: Batch, pool: Pool, base: BaseLayer | None) -> list[tuple[str, Tensor]]:
        # the slots of tokens have no memory beside them
        return [one for one in tensors_in(batch, "") if one[0] != ".token_slots"]

    def change(self, values: Tensor) -> None:
        last = sum((n - 1) * step for n, step in zip(values.shape, values.stride(), strict=True))
        place = values.storage_offset() + (last + 1 if self.behind else -1)
        super().change(values.as_strided((1,), (1,), place))


@pytest.mark.parametrize("behind", [False, True])
@pytest.mark.parametrize("site", SITES)
def test_an_element_beside_any_tensor_of_a_batch_fails(
    site: str, behind: bool, make_trial: Callable[..., Trial]
) -> None:
    trial, number, names = make_trial(tokens=6, in_features=16, **SITES[site]), 0, [""]
    while number < len(names):
        subject = WritesBeside(number, behind=behind)
        judgement = ORACLES[OracleName.CANARY].judge(replace(trial, subject=subject))
        names = subject.names
        assert judgement.failure is Failure.FOREIGN_MEMORY, names[number]
        number += 1


class AddsToBaseRows(DenseDelta):
    """Changes rows of its input that no adapter uses."""

    def apply(self, x: Tensor, out: Tensor) -> Tensor:
        x[self.token_slots < 0] += 1
        return super().apply(x, out)


def test_a_number_added_to_what_must_not_be_read_fails_although_poison_hides_it(
    make_trial: Callable[..., Trial],
) -> None:
    trial = make_trial(AddsToBaseRows, mix=Mix.RAGGED, tokens=12, in_features=16)
    judgement = ORACLES[OracleName.CANARY].judge(trial)
    assert judgement.failure is Failure.FOREIGN_MEMORY, judgement
    assert judgement.message.endswith(" of x")
