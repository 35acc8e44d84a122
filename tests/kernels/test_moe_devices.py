"""Triton launches on the current device, which need not be that of the tensors, and takes tensors
of any device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from lorakernels.batch.metadata import BatchMetadata
from lorakernels.layers.gate_up import GateUp
from lorakernels.layers.moe import FusedMoELoRA, MoEScratch
from lorakernels.moe.align import at_once as align_at_once
from lorakernels.moe.align import compared as align_compared
from lorakernels.moe.align import counted as align_counted
from lorakernels.moe.align.metadata import PairMetadata
from lorakernels.moe.delta import launch as delta_launch
from lorakernels.moe.delta import ops as delta_ops
from lorakernels.moe.layer import launch as layer_launch
from lorakernels.moe.layer import ops as layer_ops
from lorakernels.runtime import prepared, tuning

TOKENS, WIDTH = 3, 16


class Devices:
    """The current device as `on_device_of` sets it, and the kernels launched meanwhile."""

    def __init__(self) -> None:
        self.current: torch.device | None = None
        self.launched: dict[str, torch.device | None] = {}

    @contextmanager
    def on_device_of(self, tensor: Tensor) -> Iterator[None]:
        assert self.current is None
        self.current = tensor.device
        yield
        self.current = None


@dataclass
class Watched:
    """In place of a kernel: it also notes the current device of a launch."""

    name: str
    kernel: Any
    devices: Devices

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        self.devices.launched[self.name] = self.devices.current
        return self.kernel[grid]


def kernels_of(module: ModuleType) -> dict[str, Any]:
    return {name: kernel for name, kernel in vars(module).items() if name.endswith("_kernel")}


MODULES = (align_at_once, align_compared, align_counted, delta_launch, layer_launch)


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> Devices:
    devices = Devices()
    for module in (prepared, layer_ops):
        monkeypatch.setattr(module, "on_device_of", devices.on_device_of)
    for module in MODULES:
        for name, kernel in kernels_of(module).items():
            monkeypatch.setattr(module, name, Watched(name, kernel, devices))
    return devices


def test_every_launch_of_a_moe_layer_is_on_the_device_of_its_tensors(
    devices: Devices, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = (torch.zeros(2, 2 * WIDTH, WIDTH), torch.zeros(2, WIDTH, WIDTH))
    layer = FusedMoELoRA(*weights, gate_up=GateUp.HALVES, num_slots=1, rank=1)
    batch = BatchMetadata(max_tokens=TOKENS, max_slots=1, device="cpu")
    batch.prepare(torch.zeros(TOKENS, dtype=torch.int32))
    sizes = {"max_tokens": TOKENS, "top_k": 1}
    scratch = MoEScratch([layer], **sizes)
    x, ids = torch.ones(TOKENS, WIDTH), torch.zeros(TOKENS, 1, dtype=torch.int32)
    for most_at_once, most_compared in ((TOKENS, 0), (0, TOKENS), (0, 0)):
        align = replace(
            tuning.DEFAULT.align, pairs_at_once=most_at_once, compared_pairs=most_compared
        )
        monkeypatch.setattr(tuning, "DEFAULT", replace(tuning.DEFAULT, align=align))
        pairs = PairMetadata(**sizes, num_experts=2, max_slots=1, device="cpu", with_base=True)
        layer(x, ids, torch.ones(TOKENS, 1), batch, pairs, scratch)
    for path in delta_ops.MoEPath:
        out = torch.zeros(TOKENS, 2 * WIDTH)
        delta_ops.moe_delta(x, layer.w13_slots, pairs, scratch.workspace, out, path=path)
    wanted = {name for module in MODULES for name in kernels_of(module)}
    assert devices.launched == dict.fromkeys(wanted, torch.device("cpu"))


def test_a_batch_on_another_device_is_refused() -> None:
    batch = BatchMetadata(max_tokens=TOKENS, max_slots=1, device="meta")
    pairs = PairMetadata(max_tokens=TOKENS, top_k=1, num_experts=2, max_slots=1, device="cpu")
    ids = torch.zeros(TOKENS, 1, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"^batch must be on cpu \(got meta\)$"):
        pairs.prepare(ids, batch)
    assert pairs.num_rows == 0


@pytest.mark.parametrize("name", ["topk_ids", "expert_map"])
def test_routes_on_another_device_are_refused(name: str) -> None:
    batch = BatchMetadata(max_tokens=TOKENS, max_slots=1, device="cpu")
    batch.prepare(torch.zeros(TOKENS, dtype=torch.int32))
    pairs = PairMetadata(max_tokens=TOKENS, top_k=1, num_experts=2, max_slots=1, device="cpu")
    given = {
        "topk_ids": torch.zeros(TOKENS, 1, dtype=torch.int32),
        "expert_map": torch.zeros(4, dtype=torch.int32),
    }
    given[name] = given[name].to("meta")
    with pytest.raises(ValueError, match=rf"^{name} must be on cpu \(got meta\)$"):
        pairs.prepare(given["topk_ids"], batch, expert_map=given["expert_map"])
    assert pairs.num_rows == 0
