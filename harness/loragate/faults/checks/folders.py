"""Real PEFT folders: what scale each module gets, and which adapters have to be refused."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from loragate.faults.checks.activation import expect_error
from lorakernels.adapters.adapter import Adapter
from lorakernels.adapters.errors import AdapterError
from lorakernels.adapters.peft_folder import read_peft_folder
from lorakernels.adapters.slots import AdapterSlots
from lorakernels.layers.linear import LoRALinear
from lorakernels.layers.partition import Slice

_IN, _OUT = 4, 6
_MODULES = ("layers.1.q_proj", "layers.1.v_proj", "layers.11.q_proj", "layers.11.v_proj")
_PLAIN: dict[str, Any] = {
    "peft_type": "LORA",
    "r": 4,
    "lora_alpha": 6,
    "target_modules": ["q_proj", "v_proj"],
}
_CONFIGS: tuple[dict[str, Any], ...] = (
    {},
    {"use_rslora": True},
    {"rank_pattern": {"layers.1.q_proj": 2}},
    {"alpha_pattern": {"layers.1.q_proj": 5, "v_proj": 7}, "use_rslora": True},
    {"rank_pattern": {"layers.1.v_proj": 3}, "alpha_pattern": {"v_proj": 11}},
)


def check_peft_scale() -> str | None:
    """Every module's scale is alpha / r, or alpha / sqrt(r), of its own alpha and rank; the
    slots hold the factors as they were saved and the scale beside them."""
    for config in _CONFIGS:
        with tempfile.TemporaryDirectory() as folder:
            saved = _save(Path(folder), _PLAIN | config)
            try:
                adapter = read_peft_folder(folder, name="one")
            except AdapterError as error:
                return f"a sound folder with {config} is refused: {error}"
        layers = _layers()
        slot = AdapterSlots(layers).activate(adapter)
        for module in _MODULES:
            slots, rank = layers[module].slots, _pattern(config, "rank_pattern", module, 4)
            alpha = _pattern(config, "alpha_pattern", module, 6)
            scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
            found = float(slots.scales[slot, 0])
            if not math.isclose(found, scale, rel_tol=1e-6):
                return f"scale of {module} with {config} is {found:.6g}, should be {scale:.6g}"
            a, b = saved[f"{module}.A"], saved[f"{module}.B"]
            same = torch.equal(slots.a[slot, 0, :rank], a)
            if not same or not torch.equal(slots.b[slot, :, :rank], b):
                return f"the factors of {module} with {config} are not those that were saved"
    return None


def check_binding() -> str | None:
    """An adapter that would be served in part, or not at all, is refused."""
    with tempfile.TemporaryDirectory() as folder:
        _save(Path(folder), _PLAIN)
        adapter = read_peft_folder(folder, name="one")
    modules = dict(adapter.modules)
    changes = {
        "a missing module": {m: f for m, f in modules.items() if m != _MODULES[3]},
        "an unknown module": modules | {"layers.2.q_proj": modules[_MODULES[0]]},
    }
    for what, changed in changes.items():
        bad = Adapter("one", changed, adapter.targets)
        wrong = expect_error(partial(AdapterSlots(_layers()).activate, bad))
        if wrong is not None:
            return f"an adapter with {what}: {wrong}"
    bound = AdapterSlots(layers := _layers()).activate(adapter)
    empty = [m for m, layer in layers.items() if not layer.slots.ranks[bound].all()]
    return f"nothing was bound to {', '.join(empty)}" if empty else None


def _save(folder: Path, config: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Write a PEFT folder; its factors by module."""
    generator = torch.Generator().manual_seed(3)
    factors: dict[str, torch.Tensor] = {}
    for module in _MODULES:
        rank = _pattern(config, "rank_pattern", module, config["r"])
        factors[f"{module}.A"] = torch.randn(rank, _IN, generator=generator)
        factors[f"{module}.B"] = torch.randn(_OUT, rank, generator=generator)
    names = {key: f"base_model.model.{key[:-1]}lora_{key[-1]}.weight" for key in factors}
    save_file({names[k]: t for k, t in factors.items()}, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(dict(config)), encoding="utf-8")
    return factors


def _pattern(config: Mapping[str, Any], field: str, module: str, default: int) -> int:
    """The first pattern that is the module's whole name or the end of it after a dot."""
    for key, value in config.get(field, {}).items():
        if module == key or module.endswith(f".{key}"):
            return int(value)
    return default


def _layers() -> dict[str, LoRALinear]:
    return {
        module: LoRALinear(
            torch.zeros(_OUT, _IN),
            slices=[Slice(module.rpartition(".")[2], _OUT)],
            num_slots=1,
            rank=4,
        )
        for module in _MODULES
    }
