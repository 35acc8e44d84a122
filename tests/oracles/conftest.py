"""Trials on the CPU, for subjects in plain torch: nothing here needs Triton."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch

from loragate.core.machine import Machine
from loragate.core.verdict import Judgement, OracleName
from loragate.matrix.case import Case, Dtype, Mix, Site, Streams
from loragate.oracles import ORACLES
from loragate.protocol import BaseExperts, BaseLayer, Capabilities, Instance, MoEInstance, Trial
from loragate.subjects.torch.moe_layer import MoELayer
from loragate.subjects.torch.subject import TorchSubject

from .stream_layers import Layer, LayerOnStreams

_CASE = Case(
    site=Site.DENSE_DELTA,
    tokens=24,
    in_features=96,
    slices=(40, 24, 24),
    rank=8,
    slots=4,
    dtype=Dtype.BF16,
)


# with matrices of a few kilobytes threads only wait for each other and for other workers
torch.set_num_threads(1)


@pytest.fixture
def cpu() -> Machine:
    return Machine("cpu", "test", None, 1, 0)


@pytest.fixture
def make_case() -> Callable[..., Case]:
    """A small case with any field replaced."""
    return lambda **fields: replace(_CASE, **fields)


class PlantedSubject(TorchSubject):
    """The torch subject with instances of another class, and other promises."""

    def __init__(self, instance: Callable[..., Any], **promises: Any) -> None:
        self.instance, self.promises = instance, promises

    def capabilities(self, machine: Machine) -> Capabilities:
        have = super().capabilities(machine)
        assert not isinstance(have, str)
        return replace(have, **self.promises)

    def open(self, case: Case, machine: Machine, base: BaseLayer | None) -> Instance:
        return self.instance(case)


@pytest.fixture
def make_trial(cpu: Machine) -> Callable[..., Trial]:
    """A trial on a small case: of a class of instances with its own promises, else plain torch."""

    def make(
        instance: type[Instance] | None = None,
        seed: int = 1,
        promises: Mapping[str, Any] | None = None,
        **fields: Any,
    ) -> Trial:
        subject = PlantedSubject(instance, **(promises or {})) if instance else TorchSubject()
        have = subject.capabilities(cpu)
        assert not isinstance(have, str)
        return Trial(replace(_CASE, **fields), subject, have, cpu, seed)

    return make


class LayerSubject(PlantedSubject):
    """The torch subject with MoE layers of another class."""

    def open(self, case: Case, machine: Machine, base: BaseLayer | None) -> MoEInstance:
        assert isinstance(base, BaseExperts)
        return self.instance(case, base)


@pytest.fixture
def layer_trial(cpu: Machine) -> Callable[..., Trial]:
    """A trial of a class of layers, with its own capabilities."""

    def make(instance: type[MoELayer], seed: int, case: Case, **promises: Any) -> Trial:
        subject = LayerSubject(instance, **promises)
        return Trial(case, subject, subject.capabilities(cpu), cpu, seed)

    return make


@pytest.fixture
def judge_layer(
    layer_trial: Callable[..., Trial],
) -> Callable[[type[MoELayer], OracleName, int, Case], Judgement]:
    def judge(instance: type[MoELayer], oracle: OracleName, seed: int, case: Case) -> Judgement:
        trial = layer_trial(instance, seed, case)
        assert ORACLES[oracle].applies(trial) is None
        return ORACLES[oracle].judge(trial)

    return judge


@pytest.fixture
def judge_streams(make_trial: Callable[..., Trial]) -> Callable[..., Judgement]:
    """The judgement of an oracle on a class of layers of two streams, modelled ones by default."""

    def judge(
        layer: type[Layer],
        oracle: OracleName,
        seed: int = 1,
        machine: Machine | None = None,
        **fields: Any,
    ) -> Judgement:
        fields = {"site": Site.LORA_LINEAR, "streams": Streams.DUAL, "mix": Mix.SHUFFLED, **fields}
        trial = make_trial(seed=seed, **fields)
        machine, subject = machine or trial.machine, LayerOnStreams(layer)
        have = subject.capabilities(machine)
        trial = replace(trial, machine=machine, subject=subject, capabilities=have)
        assert ORACLES[oracle].applies(trial) is None
        return ORACLES[oracle].judge(trial)

    return judge
