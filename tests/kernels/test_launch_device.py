"""A launch goes to the device of its tensors, whichever device is current."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from lorakernels.batch import metadata
from lorakernels.batch.metadata import BatchMetadata
from lorakernels.dense import launch
from lorakernels.dense.ops import (
    DenseWorkspace,
    dense_delta,
    expand_from_tiles,
    shape_of_batch,
    shrink_in_tiles,
)
from lorakernels.dense.ops import shrunk_shape as shape_of_shrunk
from lorakernels.dense.weights import SlotWeights
from lorakernels.runtime import prepared

ROWS, K, WIDTH, RANK = 5, 32, 24, 4
KERNELS = ("prepare_kernel", "lora_shrink_kernel", "lora_expand_kernel", "lora_add_kernel")


class Launches:
    """Stands for the kernels: keeps the tensor whose device is current at each launch."""

    def __init__(self) -> None:
        self.current: list[Tensor] = []
        self.seen: list[tuple[str, Tensor | None]] = []

    @contextmanager
    def on_device_of(self, tensor: Tensor) -> Iterator[None]:
        self.current.append(tensor)
        yield
        self.current.pop()

    def kernel(self, name: str) -> Any:
        class Kernel:
            def __getitem__(_, grid: tuple[int, ...]) -> Callable[..., None]:
                return lambda *args, **options: self.seen.append(
                    (name, self.current[-1] if self.current else None)
                )

        return Kernel()


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    seen = Launches()
    for module in (metadata, launch, prepared):
        # a module that launches without the context has nothing to replace
        monkeypatch.setattr(module, "on_device_of", seen.on_device_of, raising=False)
        for name in KERNELS:
            if hasattr(module, name):
                monkeypatch.setattr(module, name, seen.kernel(name))
    return seen


def test_every_launch_makes_the_device_of_its_tensors_current(launches: Launches) -> None:
    weights = SlotWeights(
        num_slots=1,
        slice_widths=(WIDTH,),
        in_features=K,
        rank=RANK,
        dtype=torch.float32,
        device="cpu",
    )
    x, out = torch.zeros(ROWS, K), torch.zeros(ROWS, WIDTH)
    batch = BatchMetadata(max_tokens=ROWS, max_slots=1, device="cpu")
    batch.prepare(torch.zeros(ROWS, dtype=torch.int32))
    dense_delta(x, weights, batch, DenseWorkspace([weights], max_tokens=ROWS), out)
    shrunk = torch.zeros(shape_of_shrunk(ROWS, weights))
    shrink_in_tiles(x, weights, batch, shrunk)
    expand_from_tiles(shrunk, weights, batch, out)
    shape, tiles = shape_of_batch(ROWS, weights), launch.TileTables.of(batch)
    launch.launch_add(torch.zeros_like(out), shape, tiles, out, pdl=False)
    once = [("prepare_kernel", batch.token_slots)]
    together = [("lora_shrink_kernel", x), ("lora_expand_kernel", x)]
    apart = [("lora_shrink_kernel", x), ("lora_expand_kernel", out)]
    expected = [*once, *together, *apart, ("lora_add_kernel", out)]
    assert [name for name, _ in launches.seen] == [name for name, _ in expected]
    for (name, current), (_, wanted) in zip(launches.seen, expected, strict=True):
        assert current is wanted, f"{name} was launched on whichever device was current"


TWO_GPUS = """
import torch
from lorakernels.batch.metadata import BatchMetadata
from lorakernels.dense.ops import DenseWorkspace, dense_delta
from lorakernels.dense.weights import LoRAFactors, SlotWeights

assert torch.cuda.current_device() == 0
where = torch.device("cuda", 1)
weights = SlotWeights(
    num_slots=1, slice_widths=(64,), in_features=256, rank=16, dtype=torch.bfloat16, device=where
)
a, b, x = (torch.randn(s, device=where).bfloat16() for s in ((16, 256), (64, 16), (5, 256)))
weights.load(0, [LoRAFactors(a, b, 0.5)])
batch = BatchMetadata(max_tokens=5, max_slots=1, device=where)
workspace = DenseWorkspace([weights], max_tokens=5)
out = torch.zeros(5, 64, device=where, dtype=torch.bfloat16)
side = torch.cuda.Stream(where)
side.wait_stream(torch.cuda.current_stream(where))
with torch.cuda.stream(side):
    torch.cuda.set_device(0)
    batch.prepare(torch.zeros(5, dtype=torch.int32))
    dense_delta(x, weights, batch, workspace, out)
torch.cuda.synchronize(where)
expected = 0.5 * (x.double() @ a.double().T) @ b.double().T
torch.testing.assert_close(out.double(), expected, rtol=2e-2, atol=0.5)
assert torch.cuda.current_device() == 0
"""


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_layer_on_the_second_gpu_is_served_while_the_first_is_current(
    run_compiled: Callable[[str], None],
) -> None:
    run_compiled(TWO_GPUS)
