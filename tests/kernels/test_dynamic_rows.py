"""A traced layer takes batches of any size: a linear one, an MoE layer and an MoE delta."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch._dynamo.testing
from torch import Tensor, nn

from loragate.core.machine import select_interpreter

select_interpreter()

from lorakernels.batch.metadata import BatchMetadata  # noqa: E402
from lorakernels.common.quantised import Quantised, quantise_rows  # noqa: E402
from lorakernels.dense.ops import DenseWorkspace  # noqa: E402
from lorakernels.dense.weights import LoRAFactors  # noqa: E402
from lorakernels.layers.gate_up import GateUp  # noqa: E402
from lorakernels.layers.linear import LoRALinear  # noqa: E402
from lorakernels.layers.moe import FusedMoELoRA, MoEScratch  # noqa: E402
from lorakernels.layers.moe_partition import MoERank  # noqa: E402
from lorakernels.layers.partition import Slice  # noqa: E402
from lorakernels.moe.align.metadata import PairMetadata  # noqa: E402
from lorakernels.moe.delta.ops import moe_delta  # noqa: E402
from lorakernels.moe.weights import ExpertFactors  # noqa: E402

EXPERTS, TOP_K, HIDDEN, INTER, WIDTH, SLOTS, MOST = 4, 2, 16, 8, 24, 2, 48
BATCHES = (9, 17, 2, 40)
Step = tuple[Tensor, ...]


class Model(nn.Module):
    """A layer with the state of a step, as a traced model has it."""

    def __init__(self) -> None:
        super().__init__()
        self.batch = BatchMetadata(max_tokens=MOST, max_slots=SLOTS, device="cpu")

    @property
    def num_rows(self) -> int:
        """Of the step that was noted last."""
        return self.batch.num_rows

    def step(self, rows: int) -> Step:
        raise NotImplementedError

    def prepared(self, rows: int) -> Step:
        """A batch that mixes adapters and base rows."""
        slots = torch.arange(rows, dtype=torch.int32) % (SLOTS + 1) - 1
        self.batch.prepare(slots)
        return self.step(rows)


class Linear(Model):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = LoRALinear(
            torch.randn(WIDTH, HIDDEN), slices=(Slice("q", WIDTH),), num_slots=SLOTS, rank=4
        )
        for slot in range(SLOTS):
            part = LoRAFactors(torch.randn(4, HIDDEN), torch.randn(WIDTH, 4), 1.0 + slot)
            self.linear.load_adapter(slot, {"q": part})
        self.workspace = DenseWorkspace([self.linear.slots], max_tokens=MOST)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x, self.batch, self.workspace)

    def step(self, rows: int) -> Step:
        return (torch.randn(rows, HIDDEN, generator=torch.Generator().manual_seed(rows)),)


def weights(is_quantised: bool) -> list[Tensor | Quantised]:
    torch.manual_seed(0)
    plain = [torch.randn(EXPERTS, 2 * INTER, HIDDEN), torch.randn(EXPERTS, HIDDEN, INTER)]
    if not is_quantised:
        return [*plain]
    rows = [quantise_rows(weight.flatten(0, 1)) for weight in plain]
    return [
        Quantised(part.values.view(weight.shape), part.scales.view(weight.shape[:2]))
        for part, weight in zip(rows, plain, strict=True)
    ]


class Experts(Model):
    """An MoE layer of one rank of two."""

    def __init__(self, *, is_quantised: bool = False) -> None:
        super().__init__()
        place = MoERank(ep_size=2, ep_rank=1)
        self.is_quantised = is_quantised
        self.layer = FusedMoELoRA(
            *weights(is_quantised),
            gate_up=GateUp.HALVES,
            num_slots=SLOTS,
            rank=4,
            dtype=torch.float32,
            place=place,
        )
        for slot in range(SLOTS):
            a, b = torch.randn(EXPERTS, 4, HIDDEN), torch.randn(EXPERTS, INTER, 4)
            self.layer.load_adapter(slot, {"experts.up_proj": ExpertFactors(a, b, 1.0 + slot)})
        self.pairs = PairMetadata(
            max_tokens=MOST,
            top_k=TOP_K,
            num_experts=self.layer.cut.experts.size,
            max_slots=SLOTS,
            device="cpu",
            with_base=True,
        )
        self.scratch = MoEScratch([self.layer], max_tokens=MOST, top_k=TOP_K)

    @property
    def num_rows(self) -> int:
        return self.pairs.num_rows

    def forward(self, x: Tensor, ids: Tensor, router: Tensor) -> Tensor:
        quantised_x = quantise_rows(x) if self.is_quantised else None
        return self.layer(
            x, ids, router, self.batch, self.pairs, self.scratch, quantised_x=quantised_x
        )

    def step(self, rows: int) -> Step:
        generator = torch.Generator().manual_seed(rows)
        ids = torch.rand(rows, EXPERTS, generator=generator).topk(TOP_K).indices.int()
        x, router = torch.randn(rows, HIDDEN, generator=generator), torch.rand(rows, TOP_K)
        return x, ids, router


class Delta(Experts):
    """The delta of the first projection, of pairs that were prepared before."""

    def forward(self, x: Tensor, ids: Tensor, router: Tensor) -> Tensor:
        out = x.new_zeros(ids.numel(), 2 * INTER)
        slots, workspace = self.layer.w13_slots, self.scratch.workspace
        moe_delta(x, slots, self.pairs, workspace, out, router_weights=router)
        return out

    def prepared(self, rows: int) -> Step:
        x, ids, router = super().prepared(rows)
        self.pairs.prepare(ids, self.batch, expert_map=self.layer.routing.expert_map)
        return x, ids, router


@pytest.fixture(autouse=True)
def fresh_dynamo() -> None:
    torch._dynamo.reset()


def quantised_experts() -> Model:
    return Experts(is_quantised=True)


def dynamic(x: Tensor) -> None:
    torch._dynamo.mark_dynamic(x, 0)


def unbacked(x: Tensor) -> None:
    torch._dynamo.decorators.mark_unbacked(x, 0)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("mark", [dynamic, unbacked])
@pytest.mark.parametrize("model", [Linear, Experts, Delta, quantised_experts])
def test_one_compilation_serves_batches_of_every_size(
    backend: str, mark: Callable[[Tensor], None], model: Callable[[], Model]
) -> None:
    module = model()
    counter = torch._dynamo.testing.CompileCounterWithBackend(backend)
    compiled = torch.compile(module, backend=counter, fullgraph=True)
    # torch compiles a size of 1 apart, unless the size is unbacked
    for rows in (*BATCHES, 1) if mark is unbacked else BATCHES:
        inputs = module.prepared(rows)
        wanted = module(*inputs)
        for tensor in inputs:
            mark(tensor)
        assert torch.equal(compiled(*inputs), wanted)
        assert module.num_rows == rows
    assert counter.frame_count == 1


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("model", [Linear, Experts, Delta])
def test_a_layer_is_exported_with_any_number_of_rows(
    model: Callable[[], Model], strict: bool
) -> None:
    module = model()
    rows = torch.export.Dim("rows", min=1, max=MOST)
    inputs = module.prepared(9)
    shapes = ({0: rows},) * len(inputs)
    program = torch.export.export(module, inputs, dynamic_shapes=shapes, strict=strict)
    exported = program.module()
    for size in (*BATCHES, 1):
        inputs = module.prepared(size)
        torch.testing.assert_close(exported(*inputs), module(*inputs))


@pytest.mark.parametrize("backend", [None, "eager", "aot_eager"])
@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Linear, r"must have 9 rows, as the metadata was prepared for \(got 8\)"),
        (Experts, r"topk_ids must have 9 rows, as the batch was prepared for \(got 8\)"),
        (Delta, r"x must have 9 rows .* as the pairs were prepared for \(got shape \[8, 16\]\)"),
    ],
)
def test_a_batch_that_was_not_prepared_is_refused(
    model: Callable[[], Model], message: str, backend: str | None
) -> None:
    module = model()
    run = module if backend is None else torch.compile(module, backend=backend, fullgraph=True)
    inputs = module.prepared(9)
    for tensor in inputs:
        dynamic(tensor)
    run(*inputs)
    with pytest.raises(ValueError, match=message):
        run(*module.step(8))
    assert module.num_rows == 9


@pytest.mark.parametrize("backend", [None, "eager", "aot_eager"])
def test_more_rows_than_the_pairs_hold_are_refused(backend: str | None) -> None:
    module = Experts()
    module.batch = BatchMetadata(max_tokens=MOST + 1, max_slots=SLOTS, device="cpu")
    run = module if backend is None else torch.compile(module, backend=backend, fullgraph=True)
    inputs = module.prepared(MOST)
    for tensor in inputs:
        dynamic(tensor)
    run(*inputs)
    inputs = module.prepared(MOST + 1)
    with pytest.raises(ValueError, match=rf"^topk_ids may have {MOST} rows \(got {MOST + 1}\)$"):
        run(*inputs)
