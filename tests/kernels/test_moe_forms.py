"""What of a MoE layer runs on which stream, in every form."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from loragate.core.machine import select_interpreter

select_interpreter()

from lorakernels.moe.layer import launch, ops  # noqa: E402
from lorakernels.moe.layer.forms import MoEForm  # noqa: E402
from lorakernels.moe.layer.types import RouterWeight  # noqa: E402

from .moe_steps import Step, doubled, forks, runs  # noqa: E402


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"gated": False},
        {"router": RouterWeight.ON_INPUT},
        {"dtype": torch.bfloat16},
        {"dtype": torch.float16, "quantised": True},
        {"dtype": torch.bfloat16, "quantised": True, "gated": False},
    ],
)
@pytest.mark.parametrize("rows", [1, 5, 20])
def test_all_forms_give_the_same_bits(
    options: dict[str, Any], rows: int, recorded_streams: Any
) -> None:
    step = Step(**options)
    x = step.prepare(rows)
    single, beside, dual = (step.run(x, form, doubled) for form in MoEForm)
    assert not torch.isnan(single).any()
    assert torch.equal(single, beside)
    assert torch.equal(single, dual)
    assert forks(recorded_streams.log) == 1 + 3


@pytest.fixture
def filled_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that is allocated without a value holds NaN."""
    for owner, name in ((torch, "empty_like"), (Tensor, "new_empty")):
        allocate = getattr(owner, name)

        def filled(*args: Any, allocate: Any = allocate, **options: Any) -> Tensor:
            made: Tensor = allocate(*args, **options)
            return made.fill_(float("nan")) if made.is_floating_point() else made

        monkeypatch.setattr(owner, name, filled)


@pytest.mark.parametrize("form", MoEForm)
def test_what_memory_held_before_is_no_part_of_the_result(
    form: MoEForm, filled_memory: None, recorded_streams: Any
) -> None:
    step = Step()
    assert not step.run(step.prepare(5), form, doubled).isnan().any()


def test_a_transposed_input_reaches_the_shared_experts_as_it_is(recorded_streams: Any) -> None:
    step = Step()
    x = step.prepare(5)
    wanted = step.run(x, MoEForm.SINGLE, doubled)
    assert torch.equal(step.run(x.T.contiguous().T, MoEForm.DUAL, doubled), wanted)


ROUTED = ["main align", *["main shrink", "main product"] * 2, "main sum"]
ORDERS = {
    MoEForm.SINGLE: ["main shared", *ROUTED],
    MoEForm.BESIDE: ["side1 shared", *ROUTED],
    MoEForm.DUAL: [
        *("side1 shared", "main align", "side2 shrink", "main sums", "main rest"),
        *("side3 shrink", "main sums", "main rest", "main sum"),
    ],
}


@pytest.mark.parametrize("form", MoEForm)
def test_each_form_runs_its_parts_on_its_streams(
    form: MoEForm, noted: list[str], recorded_streams: Any
) -> None:
    step = Step()
    step.run(step.prepare(5), form, recorded_streams.noting("shared", doubled))
    assert runs(noted) == ORDERS[form]


def test_the_rest_of_a_product_waits_for_its_shrink_and_the_layer_for_the_shared_experts(
    noted: list[str], recorded_streams: Any
) -> None:
    step = Step()
    step.run(step.prepare(5), MoEForm.DUAL, recorded_streams.noting("shared", doubled))
    assert noted == [
        *("main records event0", "side1 waits event0", "side1 runs shared", "side1 records event1"),
        "main runs align",
        *("main records event2", "side2 waits event2", "side2 runs shrink", "side2 records event3"),
        *("main runs sums", "main waits event3", "main runs rest"),
        *("main records event4", "side3 waits event4", "side3 runs shrink", "side3 records event5"),
        *("main runs sums", "main waits event5", "main runs rest"),
        *("main runs sum", "main waits event1"),
    ]


def test_the_activation_is_quantised_beside_the_shrink_that_reads_it(noted: list[str]) -> None:
    step = Step(dtype=torch.bfloat16, quantised=True)
    step.run(step.prepare(5), MoEForm.DUAL)
    second = noted[noted.index("main runs rest") + 1 :]
    order = ["side1 shrink", "main quantise", "main sums", "main rest", "main sum"]
    assert runs(second) == order


def test_a_layer_without_shared_experts_forks_its_shrinks_alone(noted: list[str]) -> None:
    step = Step()
    x = step.prepare(5)
    step.run(x, MoEForm.BESIDE)
    assert forks(noted) == 0
    step.run(x, MoEForm.DUAL)
    assert forks(noted) == 2


def test_a_batch_of_base_rows_forks_its_shared_experts_alone(noted: list[str]) -> None:
    step = Step()
    x = step.prepare(5, base_only=True)
    wanted = step.run(x, MoEForm.SINGLE, doubled)
    assert torch.equal(step.run(x, MoEForm.DUAL, doubled), wanted)
    assert forks(noted) == 1
    x = step.prepare(5)
    step.run(x, MoEForm.DUAL, doubled)
    assert forks(noted) == 1 + 3, "what held for the step before holds no more"


def test_a_graph_forks_even_where_its_first_batch_has_no_adapter(
    noted: list[str], recorded_streams: Any
) -> None:
    step = Step()
    x = step.prepare(5, base_only=True)
    recorded_streams.capturing = True
    step.run(x, MoEForm.DUAL)
    assert forks(noted) == 2


@pytest.mark.parametrize("form", MoEForm)
def test_a_cut_product_and_its_shrink_are_not_launched_dependently(
    form: MoEForm, recorded_streams: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # the rest of a product reads before it waits, and no kernel ahead of it on its own stream has
    # waited for the shrink; a product in one launch is directly behind it
    step = Step()
    x = step.prepare(5)
    dependent: list[tuple[str, bool]] = []

    def noting(work: Any, name: str) -> Callable[..., None]:
        def note(*args: Any, pdl: bool, **options: Any) -> None:
            dependent.append((name, pdl))
            work(*args, pdl=False, **options)

        return note

    for module, name in ((launch, "shrink"), (launch, "launch_gemm"), (ops, "launch_sum")):
        monkeypatch.setattr(module, name, noting(getattr(module, name), name))
    monkeypatch.setattr(ops, "supports_pdl", lambda device: True)
    step.run(x, form)
    products = [pdl for name, pdl in dependent if name != "launch_sum"]
    assert set(products) == {form is not MoEForm.DUAL}
    # waits before it reads
    assert dependent[-1] == ("launch_sum", True)
