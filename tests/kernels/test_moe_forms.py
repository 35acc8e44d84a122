"""What of a MoE layer runs on which stream, in every form."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from loragate.core.machine import select_interpreter

select_interpreter()

from lorakernels.batch.metadata import BatchMetadata  # noqa: E402
from lorakernels.common.quantised import Quantised, quantise_rows  # noqa: E402
from lorakernels.dense.ops import DenseWorkspace  # noqa: E402
from lorakernels.dense.weights import LoRAFactors  # noqa: E402
from lorakernels.layers.gate_up import GateUp  # noqa: E402
from lorakernels.layers.linear import LoRALinear  # noqa: E402
from lorakernels.layers.moe import FusedMoELoRA, MoEScratch  # noqa: E402
from lorakernels.layers.partition import Slice  # noqa: E402
from lorakernels.moe.align import ops as align  # noqa: E402
from lorakernels.moe.align.metadata import PairMetadata  # noqa: E402
from lorakernels.moe.layer import launch, ops  # noqa: E402
from lorakernels.moe.layer.forms import MoEForm, plan_form  # noqa: E402
from lorakernels.moe.layer.types import (  # noqa: E402
    Activation,
    ExpertLoRA,
    LayerOperands,
    RouterWeight,
)
from lorakernels.moe.weights import ExpertFactors  # noqa: E402
from lorakernels.runtime.options import DUAL_STREAM  # noqa: E402
from lorakernels.runtime.tuning import DEFAULT  # noqa: E402

EXPERTS, TOP_K, HIDDEN, INTER, RANK, SLOTS, MOST = 2, 2, 24, 16, 4, 2, 24
GATED, PLAIN = ("gate_proj", "up_proj", "down_proj"), ("up_proj", "down_proj")
Shared = Callable[[Tensor], Tensor]


class Step:
    """A layer and the state of a step. Buffers hold NaN where no step has written."""

    def __init__(
        self,
        *,
        gated: bool = True,
        quantised: bool = False,
        router: RouterWeight = RouterWeight.ON_OUTPUT,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.seed, self.dtype, self.quantised = 0, dtype, quantised
        names = GATED if gated else PLAIN
        up = (len(names) - 1) * INTER
        w13, w2 = self.randn(EXPERTS, up, HIDDEN), self.randn(EXPERTS, HIDDEN, INTER)
        weights = [of_8_bits(w13), of_8_bits(w2)] if quantised else [w13, w2]
        self.layer = FusedMoELoRA(
            *weights,  # type: ignore[arg-type]
            gate_up=GateUp.HALVES if len(names) == 3 else None,
            num_slots=SLOTS,
            rank=RANK,
            dtype=dtype,
            projections=names,
            router_weight=router,
        )
        for slot in range(SLOTS):
            parts = {}
            for name in names:
                wide, deep = (HIDDEN, INTER) if name == "down_proj" else (INTER, HIDDEN)
                a, b = self.randn(EXPERTS, RANK, deep), self.randn(EXPERTS, wide, RANK)
                parts[f"experts.{name}"] = ExpertFactors(a, b, 1.0 + slot)
            self.layer.load_adapter(slot, parts)
        sizes = {"max_tokens": MOST, "top_k": TOP_K}
        self.scratch = MoEScratch([self.layer], **sizes)
        self.pairs = PairMetadata(
            **sizes, num_experts=EXPERTS, max_slots=SLOTS, device="cpu", with_base=True
        )
        self.batch = BatchMetadata(max_tokens=MOST, max_slots=SLOTS, device="cpu")

    def randn(self, *shape: int) -> Tensor:
        self.seed += 1
        drawn = torch.randn(*shape, generator=torch.Generator().manual_seed(self.seed))
        return drawn.to(self.dtype)

    def prepare(self, rows: int, *, base_only: bool = False) -> Tensor:
        slots = torch.arange(1, rows + 1, dtype=torch.int32) % (SLOTS + 1) - 1
        self.batch.prepare(slots * 0 - 1 if base_only else slots)
        return self.randn(rows, HIDDEN)

    def run(self, x: Tensor, form: MoEForm | None = None, shared: Shared | None = None) -> Tensor:
        buffers = self.scratch.buffers
        for buffer in (buffers.act, buffers.y, self.scratch.workspace.shrunk):
            buffer.fill_(float("nan"))
        rows = x.numel() // HIDDEN
        ids = torch.arange(rows * TOP_K, dtype=torch.int32).view(rows, TOP_K) % EXPERTS
        weights = torch.linspace(0.5, 2.0, rows * TOP_K).view(rows, TOP_K)
        given = quantise_rows(x) if self.quantised else None
        found: Tensor = self.layer(
            x,
            ids,
            weights,
            self.batch,
            self.pairs,
            self.scratch,
            quantised_x=given,
            shared=shared,
            form=form,
        )
        return found


def of_8_bits(weight: Tensor) -> Quantised:
    found = quantise_rows(weight.view(-1, weight.shape[-1]))
    return Quantised(found.values.view(weight.shape), found.scales.view(weight.shape[:-1]))


def doubled(x: Tensor) -> Tensor:
    return x * 2


@pytest.fixture
def noted(recorded_streams: Any, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What runs on which stream, the launches of a layer among it."""
    noting, multiply = recorded_streams.noting, launch.launch_gemm
    names = {"WHOLE": "product", "SUMS": "sums", "REST": "rest"}

    def product(*args: Any, part: Any = launch._Part.WHOLE, **options: Any) -> None:
        recorded_streams.note(names[part.name])
        multiply(*args, part=part, **options)

    monkeypatch.setattr(launch, "launch_gemm", product)
    monkeypatch.setattr(launch, "shrink", noting("shrink", launch.shrink))
    monkeypatch.setattr(ops, "launch_sum", noting("sum", ops.launch_sum))
    monkeypatch.setattr(ops, "quantise_rows", noting("quantise", ops.quantise_rows))
    monkeypatch.setattr(align, "fill_tables", noting("align", align.fill_tables))
    return recorded_streams.log


def runs(log: list[str]) -> list[str]:
    return [line.replace(" runs", "") for line in log if "runs" in line]


def forks(log: list[str]) -> int:
    return sum("main records" in line for line in log)


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


def test_on_one_stream_the_outputs_of_the_shared_experts_are_not_copied(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    step = Step()
    x = step.prepare(5)
    monkeypatch.setattr(Tensor, "copy_", None)
    step.run(x, MoEForm.SINGLE, doubled)


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


ON_A_GPU = """
import torch
from unittest.mock import patch
from lorakernels.batch.metadata import BatchMetadata
from lorakernels.layers.gate_up import GateUp
from lorakernels.layers.moe import FusedMoELoRA, MoEScratch
from lorakernels.moe.align.metadata import PairMetadata
from lorakernels.moe.layer.forms import MoEForm
from lorakernels.common.quantised import Quantised, quantise_rows
from lorakernels.moe.weights import ExpertFactors
from lorakernels.runtime import streams

EXPERTS, TOP_K, HIDDEN, INTER, RANK, SLOTS, MOST = 8, 2, 512, 384, 16, 3, 1024

def randn(*shape):
    return torch.randn(*shape, device="cuda")

def of_8_bits(weight):
    found = quantise_rows(weight.view(-1, weight.shape[-1]))
    return Quantised(found.values.view(weight.shape), found.scales.view(weight.shape[:-1]))

torch.manual_seed(0)
for quantised in (False, True):
    w13 = (randn(EXPERTS, 2 * INTER, HIDDEN) / 20).bfloat16()
    w2 = (randn(EXPERTS, HIDDEN, INTER) / 20).bfloat16()
    weights = [of_8_bits(w) if quantised else w for w in (w13, w2)]
    layer = FusedMoELoRA(
        *weights, gate_up=GateUp.HALVES, num_slots=SLOTS, rank=RANK, dtype=torch.bfloat16
    )
    for slot in range(SLOTS):
        parts = {}
        for name, deep, wide in (
            ("gate_proj", HIDDEN, INTER), ("up_proj", HIDDEN, INTER), ("down_proj", INTER, HIDDEN)
        ):
            a, b = randn(EXPERTS, RANK, deep) / 20, randn(EXPERTS, wide, RANK) / 4
            parts[f"experts.{name}"] = ExpertFactors(a, b, 0.5 + slot)
        layer.load_adapter(slot, parts)
    sizes = {"max_tokens": MOST, "top_k": TOP_K}
    scratch = MoEScratch([layer], **sizes)
    pairs = PairMetadata(
        **sizes, num_experts=EXPERTS, max_slots=SLOTS, device="cuda", with_base=True
    )
    for rows in (1, 16, 300, 1024):
        batch = BatchMetadata(max_tokens=MOST, max_slots=SLOTS, device="cuda")
        x = randn(rows, HIDDEN).bfloat16()
        ids = torch.rand(rows, EXPERTS, device="cuda").argsort(1)[:, :TOP_K].int().contiguous()
        router = torch.rand(rows, TOP_K, device="cuda")

        def run(form):
            given = quantise_rows(x) if quantised else None
            shared = lambda x: (x * 0.5).sin()
            return layer(
                x, ids, router, batch, pairs, scratch, quantised_x=given, shared=shared, form=form
            )

        def on_one_stream(form):
            with patch.object(streams, "stream_module", lambda device: None):
                return run(form)

        def prepare(step):
            batch.prepare((torch.arange(rows, dtype=torch.int32) * 7 + step) % (SLOTS + 1) - 1)

        outs, graphs = {}, {}
        for form in MoEForm:
            prepare(1)
            run(form)
            torch.cuda.synchronize()
            # nothing but base rows: the graph serves the batches after it, too
            batch.prepare(torch.full((rows,), -1, dtype=torch.int32))
            graphs[form] = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graphs[form]):
                outs[form] = run(form)
        for step in range(3):
            prepare(step)
            x.normal_()
            alone = {form: on_one_stream(form) for form in MoEForm}
            where = f"{quantised=} {rows=} {step=}"
            assert not alone[MoEForm.SINGLE].isnan().any(), where
            for form in MoEForm:
                wanted = alone[form]
                if not quantised:
                    # the sums of 8 bits are scaled, and that may be rounded once more
                    assert torch.equal(wanted, alone[MoEForm.SINGLE]), f"{form} {where}: one stream"
                for _ in range(5):
                    assert torch.equal(run(form), wanted), f"{form} {where}: several streams"
                    graphs[form].replay()
                    assert torch.equal(outs[form], wanted), f"{form} {where}: its graph"
"""


@pytest.mark.skipif(not torch.cuda.is_available(), reason="streams need a GPU")
def test_all_forms_give_the_same_bits_on_a_gpu_and_in_its_graphs(
    run_compiled: Callable[[str], None],
) -> None:
    run_compiled(ON_A_GPU)
