"""Which measured constants a device gets."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType

import pytest
import torch

from lorakernels.dense.plan import plan_shrink
from lorakernels.dense.shape import DenseShape
from lorakernels.runtime import tuning
from lorakernels.runtime.tuning import DEFAULT, HOPPER, UNMEASURED, tuning_of, tuning_of_family

# a table that no device has by default
OTHER = replace(DEFAULT, dense=replace(DEFAULT.dense, programs=1))


def test_a_hopper_gpu_gets_what_was_measured_on_one() -> None:
    assert tuning_of_family(9) is HOPPER


@pytest.mark.parametrize("family", [7, 8, 10, 12])
def test_an_unknown_gpu_gets_the_plans_of_one_with_less_memory(
    monkeypatch: pytest.MonkeyPatch, family: int
) -> None:
    # a table for another family must not reach it
    monkeypatch.setattr(tuning, "FAMILIES", MappingProxyType({9: OTHER}))
    assert tuning_of_family(family) is UNMEASURED
    assert UNMEASURED.dense.shared_bytes < HOPPER.dense.shared_bytes


def test_a_family_with_a_table_gets_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "FAMILIES", MappingProxyType({8: OTHER, 9: HOPPER}))
    assert tuning_of_family(8) is OTHER


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_device_that_is_no_gpu_gets_the_default(device: str) -> None:
    assert tuning_of(torch.device(device)) is DEFAULT


def test_a_plan_follows_the_constants_of_its_shape() -> None:
    shape = DenseShape(8, 8192, (4096,), 16, 2)
    assert plan_shrink(shape).splits > 1
    assert plan_shrink(replace(shape, tuning=OTHER)).splits == 1
