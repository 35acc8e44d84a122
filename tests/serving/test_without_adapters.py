"""Kernels of the adapters are left out of a step of base rows, and out of a graph only where that
was declared: a graph that was captured with base rows must serve adapters."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from loragate.core.machine import select_interpreter

select_interpreter()

from lorakernels.batch.metadata import BatchMetadata  # noqa: E402
from lorakernels.batch.steps import runs_adapters  # noqa: E402
from lorakernels.dense.forms import LinearForm  # noqa: E402
from lorakernels.dense.ops import DenseWorkspace, dense_delta  # noqa: E402
from lorakernels.gdn.forms import GDNForm  # noqa: E402
from lorakernels.layers.gdn import DeltaNetHeads, GatedDeltaNetInputProjection  # noqa: E402
from lorakernels.moe.delta.ops import MoEWorkspace, moe_delta  # noqa: E402
from lorakernels.moe.layer.forms import MoEForm  # noqa: E402
from lorakernels.runtime.options import BATCH_INVARIANT  # noqa: E402

CPU = torch.device("cpu")
ROWS = 5
BASE = torch.full((ROWS,), -1, dtype=torch.int32)
MIXED = torch.tensor([0, -1, 2, 1, -1], dtype=torch.int32)

HEADS = DeltaNetHeads(key_heads=2, value_heads=2, key_size=2, value_size=2)

OF_ADAPTERS = {
    "lora_shrink_kernel",
    "lora_expand_kernel",
    "moe_shrink_kernel",
    "moe_expand_kernel",
    "moe_one_shot_kernel",
    "moe_small_batch_kernel",
}


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any]]:
    """Every launch, and whether it is told to fold adapters in."""
    from triton.runtime.interpreter import GridExecutor

    log: list[tuple[str, Any]] = []
    launch = GridExecutor.__call__

    def noting(self: GridExecutor, *args: Any, **kwargs: Any) -> None:
        log.append((self.fn.__name__, kwargs.get("LORA")))
        launch(self, *args, **kwargs)

    monkeypatch.setattr(GridExecutor, "__call__", noting)
    return log


def of_adapters(log: list[tuple[str, Any]]) -> list[str]:
    return [name for name, folds in log if name in OF_ADAPTERS or folds]


def delta_net() -> GatedDeltaNetInputProjection:
    modules = HEADS.grouped()
    weights = [
        torch.randn(sum(m.width for m in part), 16, generator=torch.Generator().manual_seed(9))
        for part in (modules.qkvz, modules.ba)
    ]
    made = GatedDeltaNetInputProjection(*weights, modules=modules, num_slots=3, rank=4)
    made.slots.b.fill_(0.25)
    made.slots.a.fill_(0.5)
    made.slots.ranks.fill_(4)
    made.slots.scales.fill_(1)
    return made


def calls(stack: Any) -> dict[str, Callable[[], Tensor]]:
    """Every operator that adds a delta, in each of its forms."""
    batch, inputs, layer = stack.buffers.batch, stack.inputs, stack.experts
    x = inputs["x"][:ROWS]
    net = delta_net()
    workspace = DenseWorkspace([stack.linear.slots, net.slots], max_tokens=ROWS, branches=3)
    pairs, scratch = stack.buffers.pairs(layer), stack.buffers.experts(layer)
    router = inputs["router"][:ROWS]

    def experts(form: MoEForm) -> Tensor:
        ids = inputs["ids"][:ROWS]
        out: Tensor = layer(x, ids, router, batch, pairs, scratch, form=form)
        return out

    def delta() -> Tensor:
        out = torch.ones(ROWS, 16)
        dense_delta(x, stack.linear.slots, batch, workspace, out)
        return out

    def pair_delta() -> Tensor:
        pairs.prepare(inputs["ids"][:ROWS], batch)
        space = MoEWorkspace([layer.w13_slots], max_tokens=ROWS, top_k=2)
        out = torch.ones(2 * ROWS, 16)
        moe_delta(x, layer.w13_slots, pairs, space, out)
        return out

    return {
        "dense_delta": delta,
        "moe_delta": pair_delta,
        **{
            f"linear {f.name}": lambda f=f: stack.linear(x, batch, workspace, form=f)
            for f in LinearForm
        },
        **{
            f"net {f.name}": lambda f=f: torch.cat(net(x, batch, workspace, form=f), 1)
            for f in GDNForm
        },
        **{f"experts {f.name}": lambda f=f: experts(f) for f in MoEForm},
    }


NAMES = [
    "dense_delta",
    "moe_delta",
    *(f"linear {form.name}" for form in LinearForm),
    *(f"net {form.name}" for form in GDNForm),
    *(f"experts {form.name}" for form in MoEForm),
]


def capturing(graphs: Any) -> Any:
    return graphs.graph(graphs.CUDAGraph(), pool=None, stream=graphs.main)


def filled(make_stack: Any) -> Any:
    stack = make_stack(moe=True)
    for slot in range(3):
        stack.load(slot, seed=slot)
    stack.inputs.write(MIXED, stack.values(ROWS, seed=5))
    return stack


@pytest.mark.parametrize("name", NAMES)
def test_a_host_mapping_of_base_rows_launches_nothing_for_adapters_and_has_the_same_bits(
    make_stack: Any, launched: list[tuple[str, Any]], name: str
) -> None:
    stack = filled(make_stack)
    call, batch = calls(stack)[name], stack.buffers.batch
    batch.prepare(BASE)
    launched.clear()
    out = call()
    assert of_adapters(launched) == []
    # the same mapping without the knowledge of the host
    batch._note_adapters(True)
    launched.clear()
    assert torch.equal(call(), out)
    assert of_adapters(launched)
    assert not out.isnan().any()


@pytest.mark.parametrize("name", NAMES)
def test_a_capture_holds_the_kernels_of_the_adapters_whatever_rows_its_mapping_has(
    make_stack: Any, graphs: Any, launched: list[tuple[str, Any]], name: str
) -> None:
    stack = filled(make_stack)
    call, batch = calls(stack)[name], stack.buffers.batch
    batch.prepare(BASE)
    launched.clear()
    with capturing(graphs):
        call()
    assert of_adapters(launched), "a replay for other batches would serve the base model"
    with batch.without_adapters(ROWS):
        launched.clear()
        with capturing(graphs):
            call()
        assert of_adapters(launched) == []


def test_a_declaration_ends_with_its_block_also_for_pairs_that_were_prepared_in_it(
    make_stack: Any, graphs: Any
) -> None:
    stack = filled(make_stack)
    batch, pairs = stack.buffers.batch, stack.buffers.pairs(stack.experts)
    with capturing(graphs):
        with batch.without_adapters(ROWS):
            pairs.prepare(stack.inputs["ids"][:ROWS], batch)
            assert not runs_adapters(batch.tile_rows, CPU)
            assert not runs_adapters(pairs.step, CPU)
        assert runs_adapters(batch.tile_rows, CPU)
        assert runs_adapters(pairs.step, CPU)
    assert not runs_adapters(batch.tile_rows, CPU), "base rows, and nothing is captured"


@pytest.mark.parametrize("is_declared", [False, True])
def test_pairs_that_a_graph_prepares_are_not_taken_for_those_of_its_capture(
    make_stack: Any, graphs: Any, launched: list[Any], is_declared: bool
) -> None:
    stack = filled(make_stack)
    batch, pairs = stack.buffers.batch, stack.buffers.pairs(stack.experts)
    declared = batch.without_adapters(ROWS) if is_declared else nullcontext()
    batch.prepare(BASE)
    with declared, capturing(graphs):
        pairs.prepare(stack.inputs["ids"][:ROWS], batch)
    # a replay writes other tables, and tells the host nothing
    batch.prepare(MIXED)
    assert runs_adapters(pairs.step, CPU)


def test_rows_with_adapters_are_refused_while_the_batch_is_declared_to_have_none() -> None:
    batch = BatchMetadata(max_tokens=8, max_slots=3, device="cpu")
    batch.prepare(MIXED)
    with batch.without_adapters(4):
        assert batch.num_rows == 4
        assert batch.token_slots.tolist() == [-1] * 8
        message = "token_slots must be on the CPU and all -1 while the batch is declared"
        with pytest.raises(ValueError, match=message):
            batch.prepare(MIXED)
        assert batch.num_rows == 4
        batch.prepare(BASE, num_rows=6)
        assert batch.num_rows == 6
        with pytest.raises(ValueError, match="declared to be without adapters already"):
            batch.without_adapters(4).__enter__()
    batch.prepare(MIXED)
    assert batch.token_slots.tolist() == [*MIXED.tolist(), -1, -1, -1]


def test_a_declaration_that_does_not_fit_changes_nothing() -> None:
    batch = BatchMetadata(max_tokens=8, max_slots=3, device="cpu")
    batch.prepare(MIXED)
    with (
        pytest.raises(ValueError, match=r"token_slots may have 8 rows \(got 9\)"),
        batch.without_adapters(9),
    ):
        pass
    assert runs_adapters(batch.tile_rows, CPU)
    assert batch.token_slots.tolist() == [*MIXED.tolist(), -1, -1, -1]
    batch.prepare(MIXED)


def test_a_declaration_ends_where_its_block_fails(graphs: Any) -> None:
    batch = BatchMetadata(max_tokens=8, max_slots=3, device="cpu")
    with pytest.raises(KeyError), batch.without_adapters(4):
        raise KeyError
    with capturing(graphs):
        assert runs_adapters(batch.tile_rows, CPU)
    batch.prepare(MIXED)
    assert runs_adapters(batch.tile_rows, CPU)


def test_a_step_of_base_rows_does_not_end_a_declaration(graphs: Any) -> None:
    batch = BatchMetadata(max_tokens=8, max_slots=3, device="cpu")
    with batch.without_adapters(4):
        batch.prepare(BASE, num_rows=6)
        with capturing(graphs):
            assert not runs_adapters(batch.tile_rows, CPU)


@pytest.mark.parametrize(
    ("num_rows", "option", "message"),
    [
        (9, "0", r"token_slots may have 8 rows \(got 9\)"),
        (3, "0", r"num_rows must be at least 5, the live rows \(got 3\)"),
        (5, "1", "must be as it was when the tables were made"),
    ],
)
@pytest.mark.parametrize(("installed", "refused"), [(MIXED, BASE), (BASE, MIXED)])
def test_a_mapping_that_is_refused_does_not_decide_whether_adapters_run(
    monkeypatch: pytest.MonkeyPatch,
    num_rows: int,
    option: str,
    message: str,
    installed: Tensor,
    refused: Tensor,
) -> None:
    monkeypatch.setenv(BATCH_INVARIANT, "0")
    batch = BatchMetadata(max_tokens=8, max_slots=3, device="cpu")
    batch.prepare(installed)
    monkeypatch.setenv(BATCH_INVARIANT, option)
    with pytest.raises(ValueError, match=message):
        batch.prepare(refused, num_rows=num_rows)
    assert batch.num_rows == ROWS
    assert runs_adapters(batch.tile_rows, CPU) == (installed is MIXED)


def test_a_step_is_prepared_from_its_copy_on_the_device() -> None:
    batch = BatchMetadata(max_tokens=8, max_slots=3, device="cpu")
    batch.prepare(torch.zeros(2, dtype=torch.int32), num_rows=8, uploaded=MIXED)
    assert batch.token_slots.tolist() == [0, -1, *[-1] * 6]


def test_a_traced_graph_asks_anew_in_every_step(make_stack: Any, launched: list[Any]) -> None:
    torch._dynamo.reset()
    stack = filled(make_stack)
    batch, linear = stack.buffers.batch, stack.linear
    traced = torch.compile(
        lambda x: linear(x, batch, stack.buffers.dense), backend="eager", fullgraph=True
    )
    x = stack.inputs["x"][:ROWS]
    for slots in (BASE, MIXED, BASE):
        batch.prepare(slots)
        launched.clear()
        out = traced(x)
        assert bool(of_adapters(launched)) == bool((slots >= 0).any())
        base = F.linear(x, stack.weight)
        assert torch.equal(out[slots < 0], base[slots < 0])
    torch._dynamo.reset()
