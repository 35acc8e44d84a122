"""A stand-in for the tests that serving engines keep of their LoRA kernels, written anew.

It repeats their habits, not their code: data from torch.rand (all positive), one fixed seed,
rtol = atol = 6e-2 for fp16 and bf16 and 1e-2 for fp32, a loop in the same dtype as reference,
adapters drawn with randint(0, n - 1), a scale of 1, every adapter as high as its buffers,
contiguous tensors, one step an instance. Rows of the shapes are fewer than there, the
2049 columns are the same. It is generous where it can be: any exception counts as noticed, and
what upstream tests for one kernel only (rows of -1, a stale batch) is tested for all.
"""

from __future__ import annotations

import json
import tempfile
import traceback
from collections.abc import Callable, Mapping
from itertools import product
from pathlib import Path
from types import MappingProxyType

import torch
from safetensors.torch import save_file
from torch import Tensor

from loragate.faults.model import Sighting
from loragate.machine import detect_machine
from loragate.verdict import Failure, Verdict
from lorakernels.adapters.adapter import Adapter
from lorakernels.adapters.errors import AdapterError
from lorakernels.adapters.peft_folder import read_peft_folder
from lorakernels.adapters.slots import AdapterSlots
from lorakernels.dense.ops import (
    DenseWorkspace,
    bridge_shape,
    lora_expand,
    lora_shrink,
)
from lorakernels.dense.weights import LoRAFactors, SlotWeights
from lorakernels.layers.linear import LoRALinear
from lorakernels.layers.partition import Slice
from lorakernels.metadata import BatchMetadata

_SEED = 0
_HIDDEN = 2049
_REQUESTS, _TOKENS_EACH = 4, 8
_TOLERANCE = {torch.float16: 6e-2, torch.bfloat16: 6e-2, torch.float32: 1e-2}
_LAYER_TOLERANCE = 5e-3
# (adapters, rank, slices)
_SETTINGS = ((1, 16, 1), (8, 32, 3), (4, 64, 2))
_DTYPES = (torch.float16, torch.bfloat16)


def run_test(name: str) -> Sighting:
    torch.manual_seed(_SEED)
    try:
        TESTS[name]()
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        message = f"{type(error).__name__}: {str(error).strip()[:400]} ({last.name})"
        failure = Failure.WRONG_ANSWER
        return Sighting(judge=name, case="", verdict=Verdict.FAIL, failure=failure, message=message)
    return Sighting(judge=name, case="", verdict=Verdict.PASS)


def _shrink_kernel() -> None:
    for dtype, (adapters, rank, slices) in product(_DTYPES, _SETTINGS):
        weights, metadata, mapping = _setting(dtype, adapters, rank, slices, _HIDDEN, 64)
        x = _rand(len(mapping), _HIDDEN, dtype=dtype)
        bridge = torch.zeros(bridge_shape(len(mapping), weights), device=x.device)
        lora_shrink(x, weights, metadata, bridge)
        found = _by_row(bridge.sum(0), metadata, len(mapping))
        wanted = torch.zeros_like(found)
        for slot in range(adapters):
            rows = mapping == slot
            a = weights.a[slot].flatten(0, 1)
            wanted[rows] = (x[rows].float() @ a.float().T).to(wanted.dtype)
        _assert_close(found, wanted)


def _expand_kernel() -> None:
    for dtype, (adapters, rank, slices) in product(_DTYPES, _SETTINGS):
        weights, metadata, mapping = _setting(dtype, adapters, rank, slices, 64, _HIDDEN)
        rows_of_bridge = _rand(len(mapping), slices * rank, dtype=torch.float32)
        bridge = torch.zeros(bridge_shape(len(mapping), weights), device=rows_of_bridge.device)
        live = metadata.tile_rows[: bridge.shape[1]]
        bridge[0, (live >= 0).nonzero().flatten()] = rows_of_bridge[live[live >= 0].long()]
        out = _rand(len(mapping), slices * _HIDDEN, dtype=dtype)
        wanted = out.clone()
        for slot, part in product(range(adapters), range(slices)):
            rows, columns = mapping == slot, slice(part * _HIDDEN, (part + 1) * _HIDDEN)
            h = rows_of_bridge[rows, part * rank : (part + 1) * rank].to(dtype)
            wanted[rows, columns] += h @ weights.b[slot, columns].T
        lora_expand(bridge, weights, metadata, out)
        _assert_close(out, wanted)


def _rows_without_adapter() -> None:
    for mapping in ([-1, 0, -1, 0], [-1, -1, 0, 0], [0, -1, -1, -1]):
        weights, metadata, _ = _setting(torch.float16, 1, 16, 1, 64, 128, mapping)
        out = _run_delta(weights, metadata, before := _rand(4, 128, dtype=torch.float16))
        rows = torch.tensor(mapping, device=out.device) < 0
        assert torch.equal(out[rows], before[rows]), "a row of -1 was changed"
        assert not torch.equal(out[~rows], before[~rows]), "a row with an adapter got no delta"


def _stale_batch() -> None:
    weights, metadata, mapping = _setting(torch.float16, 2, 16, 1, 64, 128)
    before = _rand(len(mapping), 128, dtype=torch.float16)
    _run_delta(weights, metadata, before)
    metadata.prepare(torch.full((len(mapping),), -1, dtype=torch.int32))
    assert torch.equal(_run_delta(weights, metadata, before), before), "base rows were changed"


def _linear_layers() -> None:
    dtype, features = torch.float16, 256
    for adapters, widths in product((1, 2, 4), ((256,), (256, 256), (256, 64, 64))):
        device = detect_machine().device
        layer = LoRALinear(
            _rand(sum(widths), features, dtype=dtype),
            slices=[Slice(f"slice{index}", width) for index, width in enumerate(widths)],
            num_slots=8,
            rank=8,
        )
        loaded = {
            int(slot): [_factors(8, features, width, dtype) for width in widths]
            for slot in torch.randperm(8)[:adapters]
        }
        for slot, parts in loaded.items():
            layer.load_adapter(slot, dict(enumerate(parts)))
        chosen = list(loaded)
        requests = torch.randint(0, max(adapters - 1, 1), (16,))
        mapping = torch.tensor([chosen[index] for index in requests], dtype=torch.int32)
        metadata = BatchMetadata(max_tokens=16, max_slots=8, device=device)
        workspace = DenseWorkspace([layer.slots], max_tokens=16)
        x = _rand(16, features, dtype=dtype)
        base = torch.nn.functional.linear(x, layer.weight)
        wanted = base.clone()
        for row, slot in enumerate(mapping.tolist()):
            deltas = [x[row] @ part.a.T @ part.b.T * part.scale for part in loaded[slot]]
            wanted[row] += torch.cat(deltas)
        metadata.prepare(mapping)
        _assert_close(layer(x, metadata, workspace), wanted, _LAYER_TOLERANCE)
        for slot in range(8):
            layer.unload(slot)
        metadata.prepare(torch.zeros(16, dtype=torch.int32))
        _assert_close(layer(x, metadata, workspace), base, _LAYER_TOLERANCE)


def _adapter_file() -> None:
    """As PEFT saves it by default: alpha equals r."""
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
    _assert_close(factors.a, a)
    _assert_close(factors.b, b)
    slots = AdapterSlots({"layers.0.k_proj": _small_layer("k_proj")})
    try:
        slots.activate(adapter)
    except AdapterError:
        return
    raise AssertionError("modules that the model does not have were accepted")


def _adapter_manager() -> None:
    """Who is in which slot; what the slots hold is left to the layers' test."""
    slots = AdapterSlots({"q_proj": _small_layer("q_proj")})
    adapters = [Adapter(f"lora{i}", {"q_proj": _factors(8, 16, 32)}) for i in range(4)]
    assert [slots.activate(adapters[index]) for index in (0, 1)] == [0, 1]
    try:
        slots.activate(adapters[2])
    except AdapterError:
        slots.evict("lora0")
        assert slots.activate(adapters[2]) == 0
        assert set(slots.names) == {"lora1", "lora2"}
        return
    raise AssertionError("there were more adapters than slots")


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


def _setting(
    dtype: torch.dtype,
    adapters: int,
    rank: int,
    slices: int,
    in_features: int,
    width: int,
    mapping: list[int] | None = None,
) -> tuple[SlotWeights, BatchMetadata, Tensor]:
    """Weights, prepared metadata, and the slot of each row."""
    device = detect_machine().device
    weights = SlotWeights(
        num_slots=adapters,
        slice_widths=(width,) * slices,
        in_features=in_features,
        rank=rank,
        dtype=dtype,
        device=device,
    )
    for slot in range(adapters):
        weights.load(slot, [_factors(rank, in_features, width, dtype) for _ in range(slices)])
    if mapping is None:
        requests = torch.randint(0, max(adapters - 1, 1), (_REQUESTS,), dtype=torch.int32)
        token_slots = requests.repeat_interleave(_TOKENS_EACH)
    else:
        token_slots = torch.tensor(mapping, dtype=torch.int32)
    metadata = BatchMetadata(max_tokens=len(token_slots), max_slots=adapters, device=device)
    metadata.prepare(token_slots)
    return weights, metadata, token_slots.to(device)


def _run_delta(weights: SlotWeights, metadata: BatchMetadata, before: Tensor) -> Tensor:
    out = before.clone()
    x = _rand(len(out), weights.in_features, dtype=out.dtype)
    bridge = torch.zeros(bridge_shape(len(out), weights), device=out.device)
    lora_shrink(x, weights, metadata, bridge)
    lora_expand(bridge, weights, metadata, out)
    return out


def _by_row(bridge: Tensor, metadata: BatchMetadata, rows: int) -> Tensor:
    """[rows, slices * rank] from the order of the tiles; zero for rows without a tile."""
    live = metadata.tile_rows[: bridge.shape[0]]
    result = torch.zeros(rows, bridge.shape[1], device=bridge.device)
    result[live[live >= 0].long()] = bridge[live >= 0]
    return result


def _rand(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.rand(*shape).to(dtype).to(detect_machine().device)


def _factors(
    rank: int, in_features: int, width: int, dtype: torch.dtype = torch.float32
) -> LoRAFactors:
    a, b = _rand(rank, in_features, dtype=dtype), _rand(width, rank, dtype=dtype)
    return LoRAFactors(a, b, 1.0)


def _small_layer(name: str) -> LoRALinear:
    weight = torch.rand(32, 16, device=detect_machine().device)
    return LoRALinear(weight, slices=[Slice(name, 32)], num_slots=2, rank=8)


def _assert_close(found: Tensor, wanted: Tensor, tolerance: float | None = None) -> None:
    tolerance = _TOLERANCE[wanted.dtype] if tolerance is None else tolerance
    torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)
