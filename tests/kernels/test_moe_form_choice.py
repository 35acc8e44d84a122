"""Which form of a MoE layer is chosen, and what of it is in a traced graph."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from loragate.core.machine import select_interpreter

select_interpreter()

from lorakernels.moe.layer import ops  # noqa: E402
from lorakernels.moe.layer.forms import MoEForm, plan_form  # noqa: E402
from lorakernels.moe.layer.types import (  # noqa: E402
    Activation,
    ExpertLoRA,
    LayerOperands,
    RouterWeight,
)
from lorakernels.runtime.options import DUAL_STREAM  # noqa: E402
from lorakernels.runtime.tuning import DEFAULT  # noqa: E402

from .moe_steps import TOP_K, Step, doubled, forks  # noqa: E402


@pytest.mark.parametrize(
    ("pairs", "most", "dual_stream", "form"),
    [
        (0, 8, True, MoEForm.SINGLE),
        (1, 8, True, MoEForm.DUAL),
        (8, 8, True, MoEForm.DUAL),
        (9, 8, True, MoEForm.BESIDE),
        (1, 0, True, MoEForm.BESIDE),
        (1, 8, False, MoEForm.SINGLE),
        (9, 8, False, MoEForm.SINGLE),
    ],
)
def test_the_plan_follows_the_size_and_the_switch(
    pairs: int, most: int, dual_stream: bool, form: MoEForm
) -> None:
    tuning = replace(DEFAULT, moe=replace(DEFAULT.moe, dual_pairs=most))
    assert plan_form(pairs, tuning, dual_stream=dual_stream) is form


def test_no_shrink_leaves_its_stream_where_that_was_not_measured_to_win() -> None:
    assert plan_form(1, DEFAULT, dual_stream=True) is MoEForm.BESIDE


@pytest.mark.parametrize("backend", [None, "eager"])
def test_the_switch_is_honoured_whenever_it_changes(
    backend: str | None,
    recorded_streams: Any,
    monkeypatch: pytest.MonkeyPatch,
    fresh_dynamo: None,
) -> None:
    small = replace(DEFAULT, moe=replace(DEFAULT.moe, dual_pairs=1000))
    for place in ("align.tables", "align.metadata"):
        monkeypatch.setattr(f"lorakernels.moe.{place}.tuning_of", lambda device: small)
    step = Step()
    x, ids = step.prepare(5), torch.zeros(5, TOP_K, dtype=torch.int32)
    weights = torch.ones(5, TOP_K)

    def run() -> Tensor:
        found: Tensor = step.layer(
            x, ids, weights, step.batch, step.pairs, step.scratch, shared=doubled
        )
        return found

    run_step = run if backend is None else torch.compile(run, backend=backend, fullgraph=True)
    wanted = run_step()
    # the shared experts are a part of a traced graph, and no operator
    added = 2 if backend else 3
    for value in ("0", "1", "0", "1"):
        before = forks(recorded_streams.log)
        monkeypatch.setenv(DUAL_STREAM, value)
        assert torch.equal(run_step(), wanted)
        assert forks(recorded_streams.log) - before == added * int(value)


def test_a_traced_layer_has_its_shared_experts_in_front_and_no_streams(
    recorded_streams: Any, monkeypatch: pytest.MonkeyPatch, fresh_dynamo: None
) -> None:
    monkeypatch.setenv(DUAL_STREAM, "1")
    step = Step()
    graphs: list[torch.fx.GraphModule] = []

    def keeping(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    @torch.compile(backend=keeping, fullgraph=True)
    def apply(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        found: Tensor = step.layer(
            x, ids, weights, step.batch, step.pairs, step.scratch, shared=doubled
        )
        return found

    for rows in (5, 9, 17):
        x, ids = step.prepare(rows), torch.zeros(rows, TOP_K, dtype=torch.int32)
        weights = torch.ones(rows, TOP_K)
        for tensor in (x, ids, weights):
            torch._dynamo.mark_dynamic(tensor, 0)
        arguments = (x, ids, weights, step.batch, step.pairs, step.scratch)
        assert torch.equal(apply(x, ids, weights), step.layer(*arguments, shared=doubled))
    assert len(graphs) == 1
    calls = [str(node.target) for node in graphs[0].graph.nodes if node.op != "placeholder"]
    assert any("run_experts" in call for call in calls)
    assert not any("stream" in call or "event" in call for call in calls)


@pytest.mark.parametrize("form", [0, *(form.value for form in MoEForm)])
def test_the_operator_does_what_it_tells_torch(form: int, recorded_streams: Any) -> None:
    step = Step()
    x = step.prepare(5)
    step.run(x)
    buffers, layer = step.scratch.buffers, step.layer
    operands = LayerOperands(
        x=x,
        w13=layer.w13,
        w2=layer.w2,
        quantised_x=None,
        router_weights=torch.ones(5, TOP_K),
        act=buffers.act.zero_(),
        y=buffers.y.zero_(),
        out=torch.empty_like(x),
        activation=Activation.SILU_GATED,
        router_weight=RouterWeight.ON_OUTPUT,
    )
    step.scratch.workspace.shrunk.zero_()
    lora = ExpertLoRA(layer.w13_slots, layer.w2_slots, step.scratch.workspace)
    arguments = (*ops._flatten(operands, step.pairs, lora), form)
    torch.library.opcheck(torch.ops.lorakernels.run_experts.default, arguments)
