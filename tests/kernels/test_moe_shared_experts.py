"""The shared experts of a MoE layer: what is added, and what they may not do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from loragate.core.machine import select_interpreter

select_interpreter()

from lorakernels.dense.ops import DenseWorkspace  # noqa: E402
from lorakernels.dense.weights import LoRAFactors  # noqa: E402
from lorakernels.layers.linear import LoRALinear  # noqa: E402
from lorakernels.layers.partition import Slice  # noqa: E402
from lorakernels.moe.layer.forms import MoEForm  # noqa: E402

from .moe_steps import HIDDEN, MOST, SLOTS, Shared, Step, doubled  # noqa: E402


@pytest.mark.parametrize("form", [None, *MoEForm])
@pytest.mark.parametrize("shape", [(0,), (6,), (2, 3), (2, 0)])
def test_the_shared_experts_are_added_to_the_routed_ones(
    form: MoEForm | None, shape: tuple[int, ...], recorded_streams: Any
) -> None:
    step, rows = Step(), torch.Size(shape).numel()
    x = step.prepare(rows)
    routed = step.run(x, MoEForm.SINGLE)
    found = step.run(x.view(*shape, HIDDEN), form, doubled)
    assert torch.equal(found, (routed + doubled(x)).view(*shape, HIDDEN))


@pytest.mark.parametrize("form", MoEForm)
def test_the_result_has_no_gradient_even_if_the_shared_experts_could_give_one(
    form: MoEForm, recorded_streams: Any
) -> None:
    step, weight = Step(), torch.ones(HIDDEN, requires_grad=True)
    x = step.prepare(5)
    assert not step.run(x, form, lambda x: x * weight).requires_grad


@pytest.mark.parametrize("form", [None, *MoEForm])
def test_outputs_that_the_shared_experts_keep_stay_as_they_are(
    form: MoEForm | None, recorded_streams: Any
) -> None:
    step = Step()
    x = step.prepare(5)
    routed, kept = step.run(x, MoEForm.SINGLE), doubled(x)
    before = kept.clone()
    assert torch.equal(step.run(x, form, lambda x: kept), routed + before)
    assert torch.equal(kept, before)


def test_shared_experts_have_no_stream_of_their_own_in_a_traced_graph(
    monkeypatch: pytest.MonkeyPatch, recorded_streams: Any
) -> None:
    step = Step()
    x = step.prepare(5)
    step.run(x, MoEForm.BESIDE, doubled)
    assert recorded_streams.log
    recorded_streams.log.clear()
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    step.run(x, MoEForm.BESIDE, doubled)
    assert not recorded_streams.log


def test_on_one_stream_the_outputs_of_the_shared_experts_are_not_copied(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    step = Step()
    x = step.prepare(5)
    monkeypatch.setattr(Tensor, "copy_", None)
    step.run(x, MoEForm.SINGLE, doubled)


@pytest.mark.parametrize(
    ("shared", "message"),
    [
        (lambda x: x[:-1], r"shared must return \[5, 24\] in torch.float32 \(got \[4, 24\]"),
        (lambda x: x.double(), r"shared must return .* \(got \[5, 24\] in torch.float64\)"),
        (lambda x: x[:1], r"shared must return \[5, 24\]"),
    ],
)
@pytest.mark.parametrize("form", MoEForm)
def test_shared_experts_with_another_result_are_refused(
    shared: Shared, message: str, form: MoEForm, recorded_streams: Any
) -> None:
    step = Step()
    with pytest.raises(ValueError, match=message):
        step.run(step.prepare(5), form, shared)
    assert recorded_streams.current is recorded_streams.main
    log = recorded_streams.log
    ends = {line.split()[-1] for line in log if line.startswith("side") and "records" in line}
    assert ends <= {line.split()[-1] for line in log if line.startswith("main waits")}


def test_shared_experts_with_adapters_need_a_branch_of_their_workspace(
    recorded_streams: Any,
) -> None:
    step = Step()
    linear = LoRALinear(
        step.randn(HIDDEN, HIDDEN), slices=(Slice("o", HIDDEN),), num_slots=SLOTS, rank=2
    )
    linear.load_adapter(0, {"o": LoRAFactors(step.randn(2, HIDDEN), step.randn(HIDDEN, 2), 1.0)})
    x = step.prepare(5)
    one, two = (DenseWorkspace([linear.slots], max_tokens=MOST, branches=n) for n in (1, 2))
    wanted = step.run(x, MoEForm.SINGLE, lambda x: linear(x, step.batch, one))
    found = step.run(x, MoEForm.DUAL, lambda x: linear(x, step.batch, two))
    assert torch.equal(found, wanted)
    with pytest.raises(ValueError, match="workspace must have 2 branches"):
        step.run(x, MoEForm.BESIDE, lambda x: linear(x, step.batch, one))


@pytest.mark.parametrize("form", [MoEForm.BESIDE, MoEForm.DUAL])
def test_shared_experts_that_use_the_scratch_of_the_routed_ones_are_refused(
    form: MoEForm, recorded_streams: Any
) -> None:
    first, second = Step(), Step()
    x, _ = first.prepare(5), second.prepare(5)
    wanted = first.run(x, MoEForm.SINGLE) + second.run(x, MoEForm.SINGLE)
    assert torch.equal(first.run(x, form, lambda x: second.run(x, form)), wanted)
    second.scratch = first.scratch
    with pytest.raises(ValueError, match="scratch must not be shared by parts of a fork"):
        first.run(x, form, lambda x: second.run(x, form))
