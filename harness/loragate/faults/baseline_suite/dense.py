"""Tests of the dense kernels, linear layers and adapter files, in the usual style.

Habits: rtol = atol = 6e-2 for fp16 and bf16 and 1e-2 for fp32, adapters drawn with
randint(0, n - 1), one scale for all, contiguous tensors. The shapes have fewer rows than upstream
and the same 2049 columns. Where upstream tests something for one kernel only (rows of -1, a stale
batch), this suite tests it for all of them; any exception counts as detection.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from types import MappingProxyType

import torch
from safetensors.torch import save_file
from torch import Tensor

from loragate.core.machine import detect_machine
from loragate.faults.baseline_suite.data import assert_close, drawn_adapters, factors, rand
from lorakernels.adapters.adapter import Adapter
from lorakernels.adapters.errors import AdapterError
from lorakernels.adapters.peft_folder import read_peft_folder
from lorakernels.adapters.slots import AdapterSlots
from lorakernels.batch.metadata import BatchMetadata
from lorakernels.dense.ops import (
    DenseWorkspace,
    expand_from_tiles,
    shrink_in_tiles,
    shrunk_shape,
)
from lorakernels.dense.weights import LoRAFactors, SlotWeights
from lorakernels.layers.linear import LoRALinear
from lorakernels.layers.partition import Slice

_LAYER_TOLERANCE = 5e-3
# of the kernel tests; layers and files use 1
_KERNEL_SCALE = 0.5


@dataclass(frozen=True, slots=True)
class _Setting:
    dtype: torch.dtype
    requests: int
    tokens_each: int
    adapters: int
    rank: int
    slices: int
    hidden: int = 2049


_SETTINGS = (
    _Setting(torch.float16, 4, 8, adapters=1, rank=16, slices=1),
    _Setting(torch.bfloat16, 4, 8, adapters=8, rank=32, slices=3),
    _Setting(torch.float16, 16, 2, adapters=32, rank=16, slices=2),
    _Setting(torch.bfloat16, 1, 8, adapters=4, rank=64, slices=1),
    _Setting(torch.float16, 1, 8, adapters=2, rank=256, slices=1, hidden=512),
    # a prefill; short rows, because the interpreter is slow
    _Setting(torch.bfloat16, 8, 130, adapters=4, rank=16, slices=1, hidden=160),
)


def _shrink_kernel() -> None:
    for setting in _SETTINGS:
        mapping = _random_mapping(setting)
        weights, metadata = _prepared(setting, mapping, setting.hidden, 64)
        x = rand(len(mapping), setting.hidden, dtype=setting.dtype)
        shrunk = torch.zeros(shrunk_shape(len(mapping), weights), device=x.device)
        shrink_in_tiles(x, weights, metadata, shrunk)
        found = _by_row(shrunk.sum(0), metadata, len(mapping))
        wanted = torch.zeros_like(found)
        for slot in range(setting.adapters):
            rows = (mapping == slot).to(x.device)
            a = weights.a[slot].flatten(0, 1)
            wanted[rows] = (x[rows].float() @ a.float().T).to(wanted.dtype)
        assert_close(found, wanted)


def _expand_kernel() -> None:
    for setting in _SETTINGS:
        mapping, width = _random_mapping(setting), setting.hidden
        weights, metadata = _prepared(setting, mapping, 64, width)
        h = rand(len(mapping), setting.slices * setting.rank, dtype=torch.float32)
        shrunk = torch.zeros(shrunk_shape(len(mapping), weights), device=h.device)
        rows = metadata.tile_rows[: shrunk.shape[1]]
        shrunk[0, (rows >= 0).nonzero().flatten()] = h[rows[rows >= 0].long()]
        out = rand(len(mapping), setting.slices * width, dtype=setting.dtype)
        wanted = out.clone()
        for slot, part in product(range(setting.adapters), range(setting.slices)):
            mine = (mapping == slot).to(h.device)
            columns = slice(part * width, (part + 1) * width)
            own = h[mine, part * setting.rank : (part + 1) * setting.rank].to(setting.dtype)
            wanted[mine, columns] += own @ weights.b[slot, columns].T * _KERNEL_SCALE
        expand_from_tiles(shrunk, weights, metadata, out)
        assert_close(out, wanted)


_PLAIN = _Setting(torch.float16, 4, 1, adapters=2, rank=16, slices=1)


def _rows_without_adapter() -> None:
    for rows in ([-1, 0, -1, 0], [-1, -1, 0, 0], [0, -1, -1, -1]):
        mapping = torch.tensor(rows, dtype=torch.int32)
        weights, metadata = _prepared(replace(_PLAIN, adapters=1), mapping, 64, 128)
        out = _run_delta(weights, metadata, before := rand(4, 128, dtype=torch.float16))
        base = (mapping < 0).to(out.device)
        assert torch.equal(out[base], before[base]), "a row of -1 was changed"
        assert not torch.equal(out[~base], before[~base]), "a row with an adapter got no delta"


def _stale_batch() -> None:
    mapping = torch.tensor([0, 1, 1, 0], dtype=torch.int32)
    weights, metadata = _prepared(_PLAIN, mapping, 64, 128)
    before = rand(4, 128, dtype=torch.float16)
    _run_delta(weights, metadata, before)
    metadata.prepare(torch.full_like(mapping, -1))
    assert torch.equal(_run_delta(weights, metadata, before), before), "base rows were changed"


def _linear_layers() -> None:
    settings = ((1, (256,)), (2, (256, 256)), (4, (256, 64, 64)))
    for adapters, widths in settings:
        _linear_layer(adapters, widths)


def _linear_layer(adapters: int, widths: tuple[int, ...]) -> None:
    """Loaded, compared; emptied, compared with the base layer."""
    dtype, features, rows, slots = torch.float16, 256, 16, 8
    layer = LoRALinear(
        rand(sum(widths), features, dtype=dtype),
        slices=[Slice(f"slice{index}", width) for index, width in enumerate(widths)],
        num_slots=slots,
        rank=8,
    )
    loaded: dict[int, list[LoRAFactors]] = {}
    for slot in torch.randperm(slots)[:adapters].tolist():
        loaded[slot] = [factors(8, features, width, dtype) for width in widths]
        layer.load_adapter(slot, dict(enumerate(loaded[slot])))
    requests = drawn_adapters(adapters, rows)
    mapping = torch.tensor([list(loaded)[index] for index in requests], dtype=torch.int32)
    x = rand(rows, features, dtype=dtype)
    metadata = BatchMetadata(max_tokens=rows, max_slots=slots, device=x.device)
    workspace = DenseWorkspace([layer.slots], max_tokens=rows)
    base = torch.nn.functional.linear(x, layer.weight)
    wanted = base.clone()
    for row, slot in enumerate(mapping.tolist()):
        wanted[row] += torch.cat([x[row] @ part.a.T @ part.b.T for part in loaded[slot]])
    metadata.prepare(mapping)
    assert_close(layer(x, metadata, workspace), wanted, _LAYER_TOLERANCE)
    for slot in range(slots):
        layer.unload(slot)
    metadata.prepare(torch.zeros(rows, dtype=torch.int32))
    assert_close(layer(x, metadata, workspace), base, _LAYER_TOLERANCE)


def _adapter_file() -> None:
    """A folder as PEFT saves it by default: alpha equals r."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = {"peft_type": "LORA", "r": 8, "lora_alpha": 8, "target_modules": ["q_proj"]}
        (folder / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
        a, b = torch.rand(8, 16), torch.rand(32, 8)
        prefix = "base_model.model.layers.0.q_proj.lora_"
        tensors = {f"{prefix}A.weight": a, f"{prefix}B.weight": b}
        save_file(tensors, folder / "adapter_model.safetensors")
        adapter = read_peft_folder(folder)
    (module, factors), *more = adapter.modules.items()
    assert (module, factors.rank, factors.scale, more) == ("layers.0.q_proj", 8, 1.0, [])
    assert_close(factors.a, a)
    assert_close(factors.b, b)
    slots = AdapterSlots({"layers.0.k_proj": _small_layer("k_proj")})
    try:
        slots.activate(adapter)
    except AdapterError:
        return
    raise AssertionError("modules that the model does not have were accepted")


def _adapter_manager() -> None:
    """Which adapter is in which slot; the test of the layers compares what the slots hold."""
    slots = AdapterSlots({"q_proj": _small_layer("q_proj")})
    adapters = [Adapter(f"lora{i}", {"q_proj": factors(8, 16, 32)}) for i in range(4)]
    assert [slots.activate(adapters[index]) for index in (0, 1)] == [0, 1]
    try:
        slots.activate(adapters[2])
    except AdapterError:
        slots.evict("lora0")
        assert slots.activate(adapters[2]) == 0
        assert set(slots.names) == {"lora1", "lora2"}
        return
    raise AssertionError("more adapters than slots were accepted")


TESTS: Mapping[str, Callable[[], None]] = MappingProxyType(
    {
        "shrink kernel": _shrink_kernel,
        "expand kernel": _expand_kernel,
        "rows without adapter": _rows_without_adapter,
        "stale batch": _stale_batch,
        "linear layers": _linear_layers,
        "adapter file": _adapter_file,
        "adapter manager": _adapter_manager,
    }
)


def _random_mapping(setting: _Setting) -> Tensor:
    """int32 on the CPU: requests of equal length; the last adapter is never drawn."""
    chosen = drawn_adapters(setting.adapters, setting.requests)
    return chosen.repeat_interleave(setting.tokens_each).to(torch.int32)


def _prepared(
    setting: _Setting, mapping: Tensor, in_features: int, width: int
) -> tuple[SlotWeights, BatchMetadata]:
    device = detect_machine().device
    weights = SlotWeights(
        num_slots=setting.adapters,
        slice_widths=(width,) * setting.slices,
        in_features=in_features,
        rank=setting.rank,
        dtype=setting.dtype,
        device=device,
    )
    for slot in range(setting.adapters):
        draw = partial(factors, setting.rank, in_features, width, setting.dtype, _KERNEL_SCALE)
        weights.load(slot, [draw() for _ in range(setting.slices)])
    metadata = BatchMetadata(max_tokens=len(mapping), max_slots=setting.adapters, device=device)
    metadata.prepare(mapping)
    return weights, metadata


def _run_delta(weights: SlotWeights, metadata: BatchMetadata, before: Tensor) -> Tensor:
    out = before.clone()
    x = rand(len(out), weights.in_features, dtype=out.dtype)
    shrunk = torch.zeros(shrunk_shape(len(out), weights), device=out.device)
    shrink_in_tiles(x, weights, metadata, shrunk)
    expand_from_tiles(shrunk, weights, metadata, out)
    return out


def _by_row(shrunk: Tensor, metadata: BatchMetadata, rows: int) -> Tensor:
    """[rows, slices * rank] from the order of the tiles; zero for rows without a tile."""
    live = metadata.tile_rows[: shrunk.shape[0]]
    result = torch.zeros(rows, shrunk.shape[1], device=shrunk.device)
    result[live[live >= 0].long()] = shrunk[live >= 0]
    return result


def _small_layer(name: str) -> LoRALinear:
    weight = torch.rand(32, 16, device=detect_machine().device)
    return LoRALinear(weight, slices=[Slice(name, 32)], num_slots=2, rank=8)
