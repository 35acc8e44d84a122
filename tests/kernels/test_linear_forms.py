"""Base product and delta of a linear layer on one stream and on two."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from torch import Tensor
from torch.nn import functional as F

from loragate.core.machine import select_interpreter

select_interpreter()

from lorakernels.dense import linear as operator  # noqa: E402
from lorakernels.dense.forms import LinearForm, plan_form  # noqa: E402
from lorakernels.dense.ops import DenseWorkspace  # noqa: E402
from lorakernels.dense.plan import plan_shrink  # noqa: E402
from lorakernels.dense.shape import DenseShape  # noqa: E402
from lorakernels.dense.sizes import largest_shrunk, plan_shrunk  # noqa: E402
from lorakernels.gdn.ops import gdn_in_proj  # noqa: E402
from lorakernels.layers.linear import LoRALinear  # noqa: E402
from lorakernels.runtime.options import DUAL_STREAM  # noqa: E402
from lorakernels.runtime.streams import fork_join  # noqa: E402

from .linear_steps import WIDTH, K, Step  # noqa: E402

CPU = torch.device("cpu")


@pytest.mark.parametrize("rows", [1, 2, 9, 40])
@pytest.mark.parametrize("bias", [True, False])
def test_all_forms_that_split_k_alike_give_the_same_bits(
    recorded_streams: Any, rows: int, bias: bool
) -> None:
    step = Step(bias=bias)
    x = step.prepare(rows)
    forms = (LinearForm.SINGLE, LinearForm.AHEAD, LinearForm.DUAL)
    single, *others = (step.run(x, form) for form in forms)
    assert not torch.isnan(single).any()
    for other in others:
        assert torch.equal(single, other)
    assert "main waits event1" in recorded_streams.log


@pytest.mark.parametrize("rows", [1, 9])
def test_a_shrink_ahead_of_the_base_product_splits_k_as_one_behind_it(
    recorded_streams: Any, rows: int
) -> None:
    step = Step(in_features=8192)
    x = step.prepare(rows)
    single = step.run(x, LinearForm.SINGLE)
    assert torch.equal(single, step.run(x, LinearForm.AHEAD))
    # beside the product there are fewer parts, and other bits
    assert not torch.equal(single, step.run(x, LinearForm.DUAL))


@pytest.mark.parametrize("shape", [(0,), (0, 3), (2, 0), (1, 1), (3, 4), (2, 3, 2)])
def test_two_streams_take_inputs_of_any_dimensions(
    recorded_streams: Any, shape: tuple[int, ...]
) -> None:
    step = Step()
    x = step.prepare(max(1, torch.Size(shape).numel()))[: torch.Size(shape).numel()]
    step.metadata.prepare(step.metadata.token_slots[: len(x)].clone())
    wanted = step.run(x, LinearForm.SINGLE)
    for form in (LinearForm.DUAL, LinearForm.STORED):
        found = step.run(x.view(*shape, K), form)
        assert found.shape == (*shape, WIDTH)
        torch.testing.assert_close(found.view(-1, WIDTH), wanted, rtol=1e-5, atol=1e-4)


def test_the_shrink_runs_beside_the_base_product_and_the_expand_behind_both(
    noted_linear: list[str],
) -> None:
    step = Step()
    step.run(step.prepare(3), LinearForm.DUAL)
    assert noted_linear == [
        "main records event0",
        "side1 waits event0",
        "side1 runs shrink",
        "side1 records event1",
        "main runs base",
        "main waits event1",
        "main runs expand",
    ]


@pytest.mark.parametrize(
    ("form", "order"),
    [
        (LinearForm.SINGLE, ["base", "shrink", "expand"]),
        (LinearForm.AHEAD, ["shrink", "base", "expand"]),
    ],
)
def test_a_form_of_one_stream_forks_nothing(
    noted_linear: list[str], form: LinearForm, order: list[str]
) -> None:
    step = Step()
    step.run(step.prepare(3), form)
    assert noted_linear == [f"main runs {work}" for work in order]


@pytest.mark.parametrize("form", LinearForm)
def test_a_batch_without_adapters_is_the_base_product_alone(
    noted_linear: list[str], form: LinearForm
) -> None:
    step = Step()
    x = step.prepare(3, base_only=True)
    out = step.run(x, form)
    assert noted_linear == ["main runs base"]
    assert torch.equal(out, F.linear(x, step.linear.weight, step.linear.bias))
    step.run(step.prepare(3), LinearForm.DUAL)
    assert "side1 runs shrink" in noted_linear


def test_a_graph_forks_even_where_its_first_batch_has_no_adapter(
    noted_linear: list[str], recorded_streams: Any
) -> None:
    step = Step()
    x = step.prepare(3, base_only=True)
    recorded_streams.capturing = True
    step.run(x, LinearForm.DUAL)
    assert "side1 runs shrink" in noted_linear


@pytest.mark.parametrize("form", list(LinearForm))
def test_an_expand_is_launched_dependently_and_told_what_runs_before_it(
    noted_linear: list[str], form: LinearForm, monkeypatch: pytest.MonkeyPatch
) -> None:
    # behind its shrink it may read the base output before it waits, and behind the base product it
    # may not; the shrink is dependent where the base product comes before it on its stream. What
    # adds a stored delta comes behind the base product
    step = Step()
    x = step.prepare(3)
    dependent: dict[str, bool] = {}
    behind: list[bool] = []
    names = ("launch_shrink", "launch_expand", "launch_add")
    launches = {name: getattr(operator, name) for name in names}
    for name, launch in launches.items():

        def noting(
            *args: Any, name: str = name, launch: Any = launch, pdl: bool, **options: bool
        ) -> None:
            dependent[name] = pdl
            behind.extend(value for key, value in options.items() if key == "behind_base")
            launch(*args, pdl=False, **options)

        monkeypatch.setattr(operator, name, noting)
    monkeypatch.setattr(operator, "supports_pdl", lambda device: True)
    step.run(x, form)
    on_main = [line for line in noted_linear if line.startswith("main runs")]
    if form is LinearForm.STORED:
        assert on_main == ["main runs base", "main runs add"]
        assert dependent == {"launch_shrink": False, "launch_expand": True, "launch_add": True}
        assert behind == []
        return
    before = on_main[on_main.index("main runs expand") - 1]
    assert behind == [before == "main runs base"]
    assert dependent == {"launch_shrink": before == "main runs shrink", "launch_expand": True}
    assert behind == [form is not LinearForm.SINGLE]


@pytest.mark.parametrize(
    ("rows", "rank", "in_features", "width", "form"),
    [
        (0, 16, 4096, 28672, LinearForm.SINGLE),
        (1, 16, 14336, 4096, LinearForm.STORED),
        (64, 16, 4096, 28672, LinearForm.DUAL),
        # 400 thousand values of the delta
        (16, 16, 4096, 25000, LinearForm.STORED),
        (17, 16, 4096, 25000, LinearForm.DUAL),
        # 20 million weights, and more than 64 ranks in two slices
        (64, 33, 2000, 10000, LinearForm.DUAL),
        (96, 33, 2000, 10000, LinearForm.DUAL),
        (97, 33, 2000, 10000, LinearForm.SINGLE),
        # 64 ranks, and 256
        (128, 32, 2000, 10000, LinearForm.DUAL),
        (129, 32, 2000, 10000, LinearForm.SINGLE),
        (129, 32, 10000, 10000, LinearForm.SINGLE),
        (96, 128, 2000, 10000, LinearForm.DUAL),
        (97, 128, 2000, 10000, LinearForm.SINGLE),
        # more of them, beside as many times 20 million weights as they are 256
        (65, 129, 10000, 10000, LinearForm.SINGLE),
        (64, 129, 10000, 10000, LinearForm.DUAL),
        (5, 192, 3000, 10000, LinearForm.STORED),
        (5, 192, 2999, 10000, LinearForm.SINGLE),
        # long rows of weights
        (128, 32, 8000, 3000, LinearForm.STORED),
        (129, 32, 8000, 3000, LinearForm.SINGLE),
        # fewer: 32 ranks, and 128
        (128, 16, 4000, 2000, LinearForm.STORED),
        (129, 16, 4000, 2000, LinearForm.SINGLE),
        (96, 17, 4000, 2000, LinearForm.STORED),
        (97, 17, 4000, 2000, LinearForm.SINGLE),
        (96, 64, 4000, 2000, LinearForm.STORED),
        (2, 65, 4000, 2000, LinearForm.SINGLE),
        # a short product: the delta of 64 ranks, of 128, and one that is too large to be stored
        (128, 32, 2000, 2000, LinearForm.STORED),
        (129, 32, 2000, 2000, LinearForm.SINGLE),
        (64, 33, 2000, 2000, LinearForm.STORED),
        (65, 33, 2000, 2000, LinearForm.SINGLE),
        (64, 64, 2000, 2000, LinearForm.STORED),
        (2, 65, 2000, 2000, LinearForm.SINGLE),
        (41, 16, 1600, 10000, LinearForm.SINGLE),
        # of 10 million weights, which are square, or wide
        (128, 16, 3160, 3125, LinearForm.STORED),
        (65, 16, 2000, 2001, LinearForm.SINGLE),
        (64, 16, 2000, 2001, LinearForm.STORED),
        (64, 16, 3000, 3334, LinearForm.STORED),
        (65, 16, 3000, 3334, LinearForm.SINGLE),
        (48, 16, 3334, 3000, LinearForm.STORED),
        (49, 16, 3334, 3000, LinearForm.SINGLE),
        (49, 17, 3334, 3000, LinearForm.STORED),
        (65, 17, 3334, 3000, LinearForm.SINGLE),
        (48, 16, 4000, 4000, LinearForm.STORED),
        (49, 16, 4000, 4000, LinearForm.SINGLE),
        (64, 16, 4000, 4001, LinearForm.STORED),
        # short rows of weights: the shrink of one row
        (1, 16, 1535, 2000, LinearForm.STORED),
        (2, 16, 1535, 2000, LinearForm.SINGLE),
        (2, 16, 1536, 2000, LinearForm.STORED),
    ],
)
def test_the_plan_takes_two_streams_only_where_they_were_measured_to_win(
    rows: int, rank: int, in_features: int, width: int, form: LinearForm
) -> None:
    shape = DenseShape(rows, in_features, (width - 7, 7), rank, 2)
    assert plan_form(shape, dual_stream=True) is form
    assert plan_form(shape, dual_stream=False) is LinearForm.SINGLE


@pytest.mark.parametrize(
    ("rows", "slices", "rank", "splits"),
    [
        # 8 for each tile of a batch with as many adapters as usual
        (1, 1, 16, 8),
        (2, 1, 16, 16),
        # 32 programs for each tile
        (1, 3, 64, 4),
        (2, 3, 64, 4),
        # at most 96 programs, for 4 tiles and as many chunks of ranks as a program takes
        (8, 1, 64, 8),
        (8, 3, 16, 8),
        (8, 3, 64, 4),
        (8, 9, 64, 1),
        (128, 1, 64, 8),
        # of 4 or 8 tiles of 32 or 64 rows, in chunks of 32 ranks, and never more than behind the
        # product
        (255, 2, 16, 4),
        (255, 4, 16, 8),
        (511, 4, 16, 4),
    ],
)
def test_a_shrink_beside_the_base_product_has_few_programs(
    rows: int, slices: int, rank: int, splits: int
) -> None:
    shape = DenseShape(rows, 4096, (1024,) * slices, rank, 2)
    beside = replace(shape, beside=True)
    assert plan_shrink(beside).splits == splits <= plan_shrink(shape).splits
    # it uses the same workspace
    assert math.prod(plan_shrunk(beside, 4)) <= largest_shrunk(shape, 4, rows)


@pytest.mark.parametrize(
    ("rows", "ranks", "block"),
    [(65, 16, (16, 256)), (255, 64, (32, 256)), (65, 80, (16, 128)), (64, 64, (16, 128))],
)
def test_a_hidden_shrink_of_taller_tiles_and_few_ranks_takes_long_steps(
    rows: int, ranks: int, block: tuple[int, int]
) -> None:
    shape = DenseShape(rows, 4096, (1024,) * (ranks // 16), 16, 2)
    beside, behind = plan_shrink(replace(shape, beside=True)), plan_shrink(shape)
    assert (beside.block_n, beside.block_k) == block
    assert behind.block_k == 128


def test_two_streams_read_fewer_partials_of_the_same_sums() -> None:
    wide = Step(in_features=8192)
    x = wide.prepare(8)
    single, dual = wide.run(x, LinearForm.SINGLE), wide.run(x, LinearForm.DUAL)
    torch.testing.assert_close(dual, single, rtol=1e-5, atol=1e-3)
    assert not torch.equal(dual, single), "K is not split in another way"


def forks(log: list[str]) -> int:
    return sum("main records" in line for line in log)


@pytest.mark.parametrize("backend", [None, "eager"])
def test_the_switch_is_honoured_whenever_it_changes(
    backend: str | None,
    recorded_streams: Any,
    monkeypatch: pytest.MonkeyPatch,
    fresh_dynamo: None,
) -> None:
    step = Step()

    def run(x: Tensor) -> Tensor:
        return step.linear(x, step.metadata, step.workspace)

    run_step = run if backend is None else torch.compile(run, backend=backend, fullgraph=True)
    x = torch.ones(1, K)
    step.metadata.prepare(torch.zeros(1, dtype=torch.int32))
    wanted = run_step(x)
    for value, added in (("0", 0), ("1", 1), ("0", 0), ("1", 1), (None, 0)):
        before = forks(recorded_streams.log)
        if value is None:
            monkeypatch.delenv(DUAL_STREAM)
        else:
            monkeypatch.setenv(DUAL_STREAM, value)
        assert torch.equal(run_step(x), wanted)
        assert forks(recorded_streams.log) - before == added


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("1", "LORAKERNELS_DUAL_STREAM must be 0 on cpu, which has no streams"),
        ("yes", r"LORAKERNELS_DUAL_STREAM must be 0 or 1 \(got 'yes'\)"),
        ("", r"LORAKERNELS_DUAL_STREAM must be 0 or 1 \(got ''\)"),
    ],
)
def test_a_switch_that_cannot_be_honoured_is_refused(
    value: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = Step()
    x = step.prepare(2)
    monkeypatch.setenv(DUAL_STREAM, value)
    with pytest.raises(ValueError, match=message):
        step.run(x)


def test_layers_in_two_branches_of_a_fork_have_a_workspace_each(recorded_streams: Any) -> None:
    first, second = Step(branches=2), Step(seed=50)
    second.workspace = first.workspace
    x, _ = first.prepare(9), second.prepare(9)
    wanted = first.run(x), second.run(x)
    found: list[Tensor] = []
    used: list[int] = []

    def side() -> None:
        first.workspace.buffers[1].fill_(0)
        found.append(second.linear(x, second.metadata, second.workspace))
        used.extend(int(buffer.isnan().all()) for buffer in first.workspace.buffers)

    for buffer in first.workspace.buffers:
        buffer.fill_(float("nan"))
    out = fork_join(CPU, lambda: first.linear(x, first.metadata, first.workspace), side)
    assert used == [1, 0], "the side wrote what the rest uses"
    assert torch.equal(out, wanted[0])
    assert torch.equal(found[0], wanted[1])


def test_a_workspace_without_a_part_for_the_branch_is_refused(recorded_streams: Any) -> None:
    step = Step()
    x = step.prepare(2)
    message = r"workspace must have 2 branches to be used in this side of a fork \(got 1\)"
    with pytest.raises(ValueError, match=message):
        fork_join(CPU, lambda: None, lambda: step.run(x) and None)
    # the second side of a fork of three parts, which is farther beyond the buffers
    message = message.replace("2 branches", "3 branches")
    with pytest.raises(ValueError, match=message):
        fork_join(CPU, lambda: None, lambda: None, lambda: step.run(x) and None)
    with pytest.raises(ValueError, match=r"branches must be at least 1 \(got 0\)"):
        DenseWorkspace([step.linear.slots], max_tokens=2, branches=0)


def test_a_step_that_does_not_fit_is_refused_before_the_base_product(
    noted_linear: list[str],
) -> None:
    step = Step()
    step.prepare(3)
    with pytest.raises(ValueError, match=r"x and out must have 3 rows"):
        step.run(torch.zeros(4, K), LinearForm.DUAL)
    assert noted_linear == []


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("form", [0, *(form.value for form in LinearForm)])
def test_the_operator_does_what_it_tells_torch(
    bias: bool, form: int, recorded_streams: Any
) -> None:
    step = Step(bias=bias)
    slots, tables = step.linear.slots, step.metadata
    for x in (step.prepare(9), step.prepare(9).T.contiguous().T):
        arguments = (
            *(x, step.linear.weight, step.linear.bias, *slots.tensors, list(slots.slice_widths)),
            *(tables.tile_slots, tables.tile_rows, tables.num_tiles, step.workspace.buffers, form),
        )
        torch.library.opcheck(torch.ops.lorakernels.lora_linear.default, arguments)


def test_layers_of_one_shape_share_one_graph_without_names_or_streams(
    recorded_streams: Any, monkeypatch: pytest.MonkeyPatch, fresh_dynamo: None
) -> None:
    monkeypatch.setenv(DUAL_STREAM, "1")
    steps = [Step(seed=100 * layer) for layer in range(3)]
    graphs: list[torch.fx.GraphModule] = []

    def keeping(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    @torch.compile(backend=keeping, fullgraph=True)
    def apply(linear: LoRALinear, x: Tensor, step: Step) -> Tensor:
        return linear(x, step.metadata, step.workspace)

    for rows in (9, 17, 2, 40):
        for step in steps:
            x = step.prepare(rows)
            torch._dynamo.mark_dynamic(x, 0)
            assert torch.equal(apply(step.linear, x, step), step.run(x))
    assert len(graphs) == 1
    calls = [node.target for node in graphs[0].graph.nodes if node.op == "call_function"]
    assert any("lora_linear" in str(target) for target in calls)
    assert not any("stream" in str(target) or "event" in str(target) for target in calls)
    constants = [arg for node in graphs[0].graph.nodes for arg in node.args]
    assert not any(isinstance(arg, str) for arg in constants)


ON_A_GPU = """
import itertools
import torch
from lorakernels.batch.metadata import BatchMetadata
from lorakernels.dense.forms import LinearForm
from lorakernels.dense.ops import DenseWorkspace
from lorakernels.dense.weights import LoRAFactors
from lorakernels.layers.linear import LoRALinear
from lorakernels.layers.partition import Slice

def randn(*shape):
    return torch.randn(*shape, device="cuda")

torch.manual_seed(0)
for in_features, rank in itertools.product((512, 8192), (16, 64)):
    slices = (Slice("q", 1024), Slice("k", 256))
    weight = (randn(1280, in_features) / 30).bfloat16()
    layer = LoRALinear(weight, slices=slices, num_slots=3, rank=rank)
    for slot in range(3):
        parts = {
            part.name: LoRAFactors(randn(rank, in_features) / 30, randn(part.width, rank), 0.5)
            for part in slices
        }
        layer.load_adapter(slot, parts)
    workspace = DenseWorkspace([layer.slots], max_tokens=2048)
    for rows in (1, 16, 300, 2048):
        # a delta of 2048 rows is not stored
        forms = [form for form in LinearForm if form is not LinearForm.STORED or rows <= 300]
        batch = BatchMetadata(max_tokens=2048, max_slots=3, device="cuda")
        x, outs, graphs = randn(rows, in_features).bfloat16(), {}, {}

        def prepare(step):
            batch.prepare((torch.arange(rows, dtype=torch.int32) * 7 + step) % 4 - 1)

        for form in forms:
            prepare(1)
            layer(x, batch, workspace, form=form)
            torch.cuda.synchronize()
            # nothing but base rows: the graph serves the batches after it, too
            batch.prepare(torch.full((rows,), -1, dtype=torch.int32))
            graphs[form] = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graphs[form]):
                outs[form] = layer(x, batch, workspace, form=form)
        for step in range(4):
            prepare(step)
            x.normal_()
            wanted = {form: layer(x, batch, workspace, form=form).clone() for form in forms}
            for form in forms:
                for _ in range(5):
                    assert torch.equal(layer(x, batch, workspace, form=form), wanted[form]), form
                    graphs[form].replay()
                    assert torch.equal(outs[form], wanted[form]), form
            assert torch.equal(wanted[LinearForm.SINGLE], wanted[LinearForm.AHEAD])
            for form in forms:
                torch.testing.assert_close(
                    wanted[form], wanted[LinearForm.SINGLE], rtol=0.02, atol=0.1
                )
"""


@pytest.mark.skipif(not torch.cuda.is_available(), reason="streams need a GPU")
def test_each_form_gives_the_same_bits_again_on_a_gpu_and_in_its_graphs(
    run_compiled: Callable[[str], None],
) -> None:
    run_compiled(ON_A_GPU)


@pytest.mark.parametrize(("layer", "others"), [(operator.lora_linear, 6), (gdn_in_proj, 7)])
def test_a_form_is_given_by_its_name(layer: Callable[..., Tensor], others: int) -> None:
    with pytest.raises(TypeError, match="positional argument"):
        layer(*[None] * (others + 1))
