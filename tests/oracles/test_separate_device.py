"""Oracles keep the tensors of the device and those of the host apart, as a GPU demands."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from enum import Enum

import pytest
import torch
from torch import Tensor

from loragate.core.checkout import data_root
from loragate.core.machine import Machine
from loragate.core.verdict import Verdict
from loragate.matrix.case import OPERATIONS, Case, Site, Tier
from loragate.matrix.footprint import footprint_bytes
from loragate.matrix.load import default_files, load_cases
from loragate.protocol import Trial
from loragate.run.trial import refusal, run_trial, verdict_of
from loragate.subjects.torch.subject import TorchSubject

from .separate_device import DEVICE, HostGenerator, SeparateDevice, SeparateMachine


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[torch.device]:
    monkeypatch.setattr(torch, "Generator", HostGenerator)
    with SeparateDevice():
        yield DEVICE


@pytest.mark.parametrize("site", sorted(OPERATIONS))
def test_no_oracle_mixes_tensors_of_the_host_and_of_the_device(
    site: Site, cpu: Machine, device: torch.device
) -> None:
    subject = TorchSubject()
    have = subject.capabilities(cpu)
    shipped = load_cases(default_files(data_root()))
    able = [c for c in shipped if c.site is site and c.tier is Tier.SMOKE and not refusal(c, have)]
    few = _few(able)
    assert few
    for case in few:
        judgements = run_trial(Trial(case, subject, have, SeparateMachine(), seed=1))
        # not only oracles that do not apply
        assert verdict_of(judgements) is Verdict.PASS, judgements


def _few(cases: Sequence[Case]) -> list[Case]:
    """The smallest cases that have each oracle and each named value of an axis of all of them."""
    seen: set[object] = set()
    chosen = []
    for case in sorted(cases, key=footprint_bytes):
        values = [(field.name, getattr(case, field.name)) for field in fields(case)]
        has = {pair for pair in values if isinstance(pair[1], Enum)} | {*case.oracles}
        if has - seen:
            chosen.append(case)
        seen |= has
    return chosen


@pytest.mark.parametrize(
    "mixes",
    [
        lambda here, there: here + there,
        lambda here, there: there @ here.T,
        lambda here, there: torch.cat([here, there]),
        lambda here, there: torch.stack([here.any(), there.any()]),
        lambda here, there: torch.where(here > 0, there, there),
        lambda here, there: there.masked_fill_(here > 0, 0.0),
        lambda here, there: here[there.long()],
        lambda here, there: there.__setitem__(there > 0, here.flatten()),
        lambda here, there: here.add_(there),
        lambda here, there: there.numpy(),
    ],
)
def test_the_device_refuses_what_a_gpu_refuses(
    mixes: Callable[[Tensor, Tensor], object], device: torch.device
) -> None:
    here, there = torch.ones(2, 2), torch.ones(2, 2, device=device)
    with pytest.raises((RuntimeError, TypeError), match=r"of the device|on the device"):
        mixes(here, there)


@pytest.mark.parametrize(
    "takes",
    [
        lambda here, there: there.copy_(here),
        lambda here, there: there + here.sum(),
        lambda here, there: there[here.long()],
        lambda here, there: there[:1].copy_(here[:1]),
        lambda here, there: here.to(there.device) + there,
        lambda here, there: here.to(there) + there,
        lambda here, there: torch.empty(2, 2, device=there.device).copy_(there),
        lambda here, there: there.new_zeros(2).to(torch.int64),
        lambda here, there: there.max(1).values,
        lambda here, there: torch.stack([there.any(), there.all()]),
    ],
)
def test_the_device_takes_what_a_gpu_takes_and_keeps_the_result(
    takes: Callable[[Tensor, Tensor], Tensor], device: torch.device
) -> None:
    here, there = torch.ones(2, 2), torch.ones(2, 2, device=device)
    assert takes(here, there).device == device


@pytest.mark.parametrize(
    "copies",
    [
        lambda there: there.cpu(),
        lambda there: there.to("cpu"),
        lambda there: there.to(device="cpu", dtype=torch.float64),
        lambda there: torch.empty(2, 2).copy_(there),
        lambda there: torch.zeros_like(there, device="cpu"),
    ],
)
def test_what_is_copied_from_the_device_is_the_hosts_own(
    copies: Callable[[Tensor], Tensor], device: torch.device
) -> None:
    there = torch.ones(2, 2, device=device)
    copy = copies(there)
    copy.fill_(3)
    assert copy.device == torch.device("cpu")
    assert there.sum().item() == 4
