"""The slots of a MoE layer after loading an adapter, in every layout of its factors, and reading
files of MoE adapters."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from loragate.faults.checks.activation import expect_error
from loragate.faults.checks.expert_layer import EXPERTS, HIDDEN, INTER, RANK, numbered, stacked
from lorakernels.adapters.adapter import Adapter
from lorakernels.adapters.errors import AdapterError
from lorakernels.adapters.peft_folder import read_peft_folder
from lorakernels.adapters.slots import AdapterSlots
from lorakernels.layers.moe import FusedMoELoRA
from lorakernels.moe.weights import ExpertFactors, Factors

_GATED = ("gate_proj", "up_proj", "down_proj")
_LAYER = "model.layers.{}.mlp.experts"
_RANK = 2


def check_expert_slots() -> str | None:
    for scene in (_every_spelling, _again, _emptied, _in_part):
        wrong = scene()
        if wrong is not None:
            return wrong
    return None


def _every_spelling() -> str | None:
    """Stacked, one by one, gate and up in one: the slots hold the same."""
    parts = dict(stacked(_GATED, _RANK, 10))
    gate, up = parts["experts.gate_proj"], parts["experts.up_proj"]
    both = ExpertFactors(gate.a, torch.cat([gate.b, up.b], 1), gate.scale)
    fused = {"experts.gate_up_proj": both, "experts.down_proj": parts["experts.down_proj"]}
    same = parts | {"experts.up_proj": ExpertFactors(gate.a, up.b, gate.scale)}
    spellings: dict[str, tuple[Mapping[str, Factors], Mapping[str, ExpertFactors]]] = {
        "stacked": (parts, parts),
        "one by one": (numbered(parts), parts),
        "gate and up in one": (fused, same),
    }
    for what, (given, wanted) in spellings.items():
        layer = _layer()
        layer.load_adapter(0, given)
        for index, name in enumerate(_GATED):
            slots, own = (layer.w2_slots, 0) if index == 2 else (layer.w13_slots, index)
            part, width = wanted[f"experts.{name}"], slots.slice_widths[own]
            rows = slots.b[0, :, own * width : (own + 1) * width, :_RANK]
            if not torch.equal(slots.a[0, :, own, :_RANK], part.a) or not torch.equal(rows, part.b):
                return f"{name} of an adapter that comes {what} is another's"
            if (int(slots.ranks[0, own]), float(slots.scales[0, own])) != (_RANK, part.scale):
                return f"rank or scale of {name} of an adapter that comes {what} is wrong"
    return None


def _again() -> str | None:
    """Loaded twice: the same bits, and the adapter's own tensors untouched (vllm #20873)."""
    layer, parts = _layer(), stacked(_GATED, _RANK, 10)
    before = [tensor.clone() for part in parts.values() for tensor in (part.a, part.b)]
    layer.load_adapter(0, parts)
    first = _state(layer)
    layer.load_adapter(0, parts)
    own = [tensor for part in parts.values() for tensor in (part.a, part.b)]
    if not _equal(own, before):
        return "loading an adapter changed the adapter's own tensors"
    return None if _equal(_state(layer), first) else "an adapter that is loaded again differs"


def _emptied() -> str | None:
    layer = _layer()
    layer.load_adapter(0, stacked(_GATED, _RANK, 10))
    layer.unload(0)
    if any(bool(tensor.count_nonzero()) for tensor in _state(layer)):
        return "an adapter that was unloaded is still in its slot"
    return None


def _in_part() -> str | None:
    """Factors for some experts of a projection are refused, with the slot as it was."""
    layer, parts = _layer(), stacked(_GATED, _RANK, 10)
    layer.load_adapter(0, parts)
    before = _state(layer)
    fewer = {n: f for n, f in numbered(parts).items() if not n.startswith("experts.3.up")}
    try:
        layer.load_adapter(0, fewer)
    except ValueError:
        return None if _equal(_state(layer), before) else "a refusal changed the slot"
    except Exception as error:
        return f"an adapter without one expert raises {type(error).__name__}"
    return "an adapter without one expert was accepted"


def check_expert_files() -> str | None:
    for scene in (_flat, _mixed_layouts, _whole_projection_missing):
        wrong = scene()
        if wrong is not None:
            return wrong
    return None


def _flat() -> str | None:
    """Parameters as PEFT flattens them: experts slowest in A, fastest in B (vllm #31534), and
    either dimension of the parameter taken for its input."""
    hold = _LAYER.format(0)
    sizes = {"gate_up_proj": (HIDDEN, 2 * INTER), "down_proj": (INTER, HIDDEN)}
    for turned in (False, True):
        tensors: dict[str, Tensor] = {}
        for module, name in ((f"{hold}.base_layer", "gate_up_proj"), (hold, "down_proj")):
            ends = sizes[name][::-1] if turned else sizes[name]
            tensors |= _pair(module, *_numbers(*ends))
        config = {"target_parameters": [f"experts.{name}" for name in sizes]}
        adapter = _read(tensors, config)
        if isinstance(adapter, str):
            return f"a sound file is refused: {adapter}"
        for name, (inputs, width) in sizes.items():
            ends = (width, inputs) if turned else (inputs, width)
            wanted = [_numbers(*ends, expert) for expert in range(EXPERTS)]
            a, b = (torch.stack(side) for side in zip(*wanted, strict=True))
            if turned:
                a, b = b.transpose(1, 2), a.transpose(1, 2)
            found = adapter.modules[f"{hold}.{name}"]
            if not torch.equal(found.a, a) or not torch.equal(found.b, b):
                return f"factors of {name} went to other experts (turned: {turned})"
    return None


def _numbers(inputs: int, width: int, expert: int | None = None) -> tuple[Tensor, Tensor]:
    """A [experts * r, inputs] and B [width, r * experts] as they are in a file, or those of one
    expert."""
    a = torch.arange(EXPERTS * _RANK * inputs).float().view(EXPERTS, _RANK, inputs)
    b = torch.arange(width * _RANK * EXPERTS).float().view(width, _RANK, EXPERTS)
    if expert is not None:
        return a[expert], b[:, :, expert]
    return a.flatten(0, 1), b.flatten(1, 2)


def _mixed_layouts() -> str | None:
    """One layer with its experts one by one, the next one with a stack."""
    parts = stacked(("up_proj",), _RANK, 10)
    tensors: dict[str, Tensor] = {}
    for name, factors in numbered(parts).items():
        tensors |= _pair(_LAYER.format(0).removesuffix("experts") + name, factors.a, factors.b)
    part = parts["experts.up_proj"]
    tensors |= _pair(f"{_LAYER.format(1)}.up_proj", part.a, part.b)
    adapter = _read(tensors, {"target_modules": ["up_proj"]})
    return None if isinstance(adapter, str) else "two layouts of experts in one file were accepted"


def _whole_projection_missing() -> str | None:
    """An adapter must have factors for everything it targets, experts included (vllm #47088)."""
    parts = numbered(stacked(_GATED, _RANK, 10))
    prefix = _LAYER.format(0).removesuffix("experts")

    def activate(names: Callable[[str], bool]) -> AdapterSlots:
        tensors: dict[str, Tensor] = {}
        for name, factors in parts.items():
            if names(name):
                tensors |= _pair(prefix + name, factors.a, factors.b)
        adapter = _read(tensors, {"target_modules": list(_GATED)})
        assert isinstance(adapter, Adapter), adapter
        slots = AdapterSlots({_LAYER.format(0): _layer()})
        slots.activate(adapter)
        return slots

    activate(lambda name: True)
    wrong = expect_error(lambda: activate(lambda name: "up_proj" not in name))
    return None if wrong is None else f"an adapter without any up_proj of experts: {wrong}"


def _read(tensors: Mapping[str, Tensor], config: Mapping[str, object]) -> Adapter | str:
    """The adapter in a folder of these, or why it is refused."""
    fields = {"peft_type": "LORA", "r": _RANK, "lora_alpha": 3, "target_modules": []}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        text = json.dumps(fields | dict(config))
        (folder / "adapter_config.json").write_text(text, encoding="utf-8")
        save_file({key: tensor.clone() for key, tensor in tensors.items()}, folder / _WEIGHTS)
        try:
            return read_peft_folder(folder, name="one")
        except AdapterError as error:
            return str(error)


_WEIGHTS = "adapter_model.safetensors"


def _pair(module: str, a: Tensor, b: Tensor) -> dict[str, Tensor]:
    key = f"base_model.model.{module}.lora_"
    return {f"{key}A.weight": a, f"{key}B.weight": b}


def _layer() -> FusedMoELoRA:
    w13, w2 = torch.zeros(EXPERTS, 2 * INTER, HIDDEN), torch.zeros(EXPERTS, HIDDEN, INTER)
    return FusedMoELoRA(w13, w2, num_slots=2, rank=RANK)


def _state(layer: FusedMoELoRA) -> list[Tensor]:
    both = (layer.w13_slots, layer.w2_slots)
    return [t.clone() for slots in both for t in (slots.a, slots.b, slots.ranks, slots.scales)]


def _equal(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
