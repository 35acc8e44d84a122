"""A traced layer takes batches of any size."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch._dynamo.testing
from torch import Tensor, nn

from loragate.core.machine import select_interpreter

select_interpreter()

from lorakernels.batch.metadata import BatchMetadata  # noqa: E402
from lorakernels.dense.ops import DenseWorkspace  # noqa: E402
from lorakernels.dense.weights import LoRAFactors  # noqa: E402
from lorakernels.layers.linear import LoRALinear  # noqa: E402
from lorakernels.layers.partition import Slice  # noqa: E402

K, WIDTH, SLOTS, MOST = 16, 24, 2, 48
BATCHES = (9, 17, 2, 40)


class Model(nn.Module):
    """A layer with the state of a step, as a traced model has it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = LoRALinear(
            torch.randn(WIDTH, K), slices=(Slice("q", WIDTH),), num_slots=SLOTS, rank=4
        )
        for slot in range(SLOTS):
            part = LoRAFactors(torch.randn(4, K), torch.randn(WIDTH, 4), 1.0 + slot)
            self.linear.load_adapter(slot, {"q": part})
        self.metadata = BatchMetadata(max_tokens=MOST, max_slots=SLOTS, device="cpu")
        self.workspace = DenseWorkspace([self.linear.slots], max_tokens=MOST)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x, self.metadata, self.workspace)

    def prepared(self, rows: int) -> Tensor:
        """x of a batch that mixes adapters and base rows."""
        slots = torch.arange(rows, dtype=torch.int32) % (SLOTS + 1) - 1
        self.metadata.prepare(slots)
        return torch.randn(rows, K, generator=torch.Generator().manual_seed(rows))


@pytest.fixture(autouse=True)
def fresh_dynamo() -> None:
    torch._dynamo.reset()


def dynamic(x: Tensor) -> None:
    torch._dynamo.mark_dynamic(x, 0)


def unbacked(x: Tensor) -> None:
    torch._dynamo.decorators.mark_unbacked(x, 0)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("mark", [dynamic, unbacked])
def test_one_compilation_serves_batches_of_every_size(
    backend: str, mark: Callable[[Tensor], None]
) -> None:
    model = Model()
    counter = torch._dynamo.testing.CompileCounterWithBackend(backend)
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    # torch compiles a size of 1 apart, unless the size is unbacked
    for rows in (*BATCHES, 1) if mark is unbacked else BATCHES:
        x = model.prepared(rows)
        wanted = model(x)
        mark(x)
        assert torch.equal(compiled(x), wanted)
    assert counter.frame_count == 1


@pytest.mark.parametrize("strict", [False, True])
def test_a_layer_is_exported_with_any_number_of_rows(strict: bool) -> None:
    model = Model()
    rows = torch.export.Dim("rows", min=1, max=MOST)
    program = torch.export.export(
        model, (model.prepared(9),), dynamic_shapes=({0: rows},), strict=strict
    )
    exported = program.module()
    for size in (*BATCHES, 1):
        x = model.prepared(size)
        torch.testing.assert_close(exported(x), model(x))


@pytest.mark.parametrize("backend", [None, "eager", "aot_eager"])
def test_a_batch_that_was_not_prepared_is_refused(backend: str | None) -> None:
    model = Model()
    run = model if backend is None else torch.compile(model, backend=backend, fullgraph=True)
    x = model.prepared(9)
    dynamic(x)
    run(x)
    message = r"must have 9 rows, as the metadata was prepared for \(got 8\)"
    with pytest.raises(ValueError, match=message):
        run(torch.zeros(8, K))
