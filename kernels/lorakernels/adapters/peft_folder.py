"""Reads a PEFT folder, adapter_config.json and adapter_model.safetensors, as an Adapter.

Invariant: every tensor of the file is used. Copies of base weights that PEFT adds are kept as
digests, with which a layer compares its own weight. Every module has both factors with the rank
that the config gives it, every value is finite. Factors of stacked experts have an axis of experts,
which is 1 where all experts share them. The scale stays beside the factors and is applied by the
kernel alone, so it cannot be folded in twice.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from lorakernels.adapters.adapter import Adapter
from lorakernels.adapters.errors import AdapterError, hint, listing, printable
from lorakernels.adapters.expert_layout import detect_layout, is_stacked_name
from lorakernels.adapters.expressions import limited_matching
from lorakernels.adapters.files import is_folder, require_regular
from lorakernels.adapters.peft_config import PeftConfig, read_peft_config
from lorakernels.adapters.peft_experts import name_parameters, unflatten
from lorakernels.common.digests import SavedWeight
from lorakernels.common.stacked_weights import MAX_RANK
from lorakernels.dense.weights import LoRAFactors
from lorakernels.moe.weights import ExpertFactors, Factors

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
_PICKLE_FILE = "adapter_model.bin"

# the factors of an embedding are parameters of their own, those of other modules are in modules
_TENSOR_NAME = re.compile(
    r"base_model\.model\.(?P<module>.+)\."
    r"(?P<kind>lora_(?=[AB]\.weight)|lora_embedding_(?=[AB]$))(?P<factor>[AB])(?:\.weight)?"
)
# beside the factors of these modules PEFT saves the base weights, and loads them again: rows of
# tokens that were added before the training are nowhere else
_COPY_NAME = re.compile(
    r"base_model\.model\.(?P<module>(?:.+\.)?(?:lm_head|embed_tokens))\.base_layer\.(?:weight|bias)"
)
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
# part of a tensor's name -> the unsupported feature that such an adapter uses
_FOREIGN_TENSORS = {
    "lora_magnitude_vector": "DoRA is not supported",
    ".lora_B.bias": "a bias of lora_B is not supported",
    ".modules_to_save.": "modules_to_save is not supported",
    ".base_layer.": "changed base weights are not supported",
}


def read_peft_folder(folder: Path | str, *, name: str | None = None) -> Adapter:
    """The adapter in `folder`, under `name` or else the folder's own name.

    Tensors are on the CPU, in the dtype of the file. Raises AdapterError.
    """
    folder = Path(folder)
    if not is_folder(folder):
        raise AdapterError(f"{folder}: must be a folder with {CONFIG_FILE} and {WEIGHTS_FILE}")
    with limited_matching():
        return _read_folder(folder, name or folder.resolve().name)


def _read_folder(folder: Path, name: str) -> Adapter:
    config = read_peft_config(folder / CONFIG_FILE)
    weights = folder / WEIGHTS_FILE
    tensors, bases = _read_tensors(weights)
    factors, parameters = name_parameters(weights, config, _pair(weights, tensors))
    modules: dict[str, Factors] = {}
    for module, pair in (factors | parameters).items():
        if module in parameters or is_stacked_name(module):
            modules[module] = _check_experts(weights, config, module, *pair)
        else:
            checked = _check_module(weights, config, module, *pair)
            modules[module] = replace(checked, base=bases.get(module))
    detect_layout(str(weights), modules)
    return Adapter(name, modules, config.targets)


def _read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, SavedWeight]]:
    """The factors by name, and what the file has of base weights, by module."""
    # a link counts even if what it leads to may not be looked at
    if not os.path.lexists(path) and os.path.lexists(path.parent / _PICKLE_FILE):
        raise AdapterError(
            f"{path.parent / _PICKLE_FILE}: a pickle can run code and is never opened; "
            f"save the adapter as {WEIGHTS_FILE}"
        )
    require_regular(path)
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            names = sorted(file.keys())
            copies = {n: file.get_slice(n).get_shape() for n in names if _COPY_NAME.fullmatch(n)}
            # a copy: the mapped file may be overwritten by the next training step
            tensors = {n: file.get_tensor(n).clone() for n in names if n not in copies}
            for key, shape in copies.items():
                _check_copy(path, key, shape, tensors)
            bases = _bases(file, copies)
    except OSError as bad:
        raise AdapterError(f"{path}: cannot be read: {bad.strerror or bad}") from bad
    except SafetensorError as bad:
        raise AdapterError(f"{path}: not a safetensors file: {printable(bad)}") from bad
    return tensors, bases


def _bases(file: Any, copies: Collection[str]) -> dict[str, SavedWeight]:
    found = {}
    for key in copies:
        if (name := _COPY_NAME.fullmatch(key)) and key.endswith(".weight"):
            found[name["module"]] = SavedWeight.of(file.get_tensor(key))
    return found


def _check_copy(path: Path, key: str, shape: list[int], tensors: Mapping[str, Tensor]) -> None:
    """A copy of a base weight is of a module that has factors, and has its sizes."""
    module = key.rpartition(".base_layer.")[0]
    a, b = (tensors.get(f"{module}.lora_{factor}.weight") for factor in "AB")
    wanted = [] if a is None or b is None else [*b.shape[:1], *a.shape[1:2]]
    a, b = (tensors.get(f"{module}.lora_embedding_{factor}") for factor in "AB")
    if a is not None and b is not None:
        # an embedding has a row for each input
        wanted = [*a.shape[1:2], *b.shape[:1]]
    if not wanted:
        raise AdapterError(f"{path}: {printable(key)}: {_why_foreign(key)}")
    wanted = wanted if key.endswith(".weight") else wanted[:1]
    if shape != wanted:
        raise AdapterError(
            f"{path}: {printable(key)} must be {wanted}, as the factors say (got {shape})"
        )


def _pair(path: Path, tensors: Mapping[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
    found: dict[str, dict[str, Tensor]] = {}
    kinds: dict[str, str] = {}
    for key, tensor in tensors.items():
        parts = _TENSOR_NAME.fullmatch(key)
        if parts is None:
            raise AdapterError(f"{path}: {printable(key)}: {_why_foreign(key)}")
        module = parts["module"]
        if kinds.setdefault(module, parts["kind"]) != parts["kind"]:
            raise AdapterError(
                f"{path}: {printable(module)} must have factors of an embedding or of another "
                "module (got both)"
            )
        found.setdefault(module, {})[parts["factor"]] = tensor
    if not found:
        raise AdapterError(f"{path}: holds no factors, so the base model would be served")
    halves = {m: next(iter(pair)) for m, pair in found.items() if len(pair) == 1}
    if halves:
        module = min(halves)
        kind, other = kinds[module], "B" if halves[module] == "A" else "A"
        raise AdapterError(
            f"{path}: {printable(module)} has {kind}{halves[module]} but no {kind}{other}"
            f" ({len(halves)} such modules: {listing(halves)})"
        )
    return {module: (pair["A"], pair["B"]) for module, pair in found.items()}


def _why_foreign(key: str) -> str:
    for part, reason in _FOREIGN_TENSORS.items():
        if part in key:
            return reason
    if ".lora_" not in key:
        return "weights of the base model are not supported"
    shape = "base_model.model.<module>.lora_A.weight, .lora_B.weight or, of an embedding, "
    shape += ".lora_embedding_A or .lora_embedding_B"
    return f"the tensor's name must be {shape}"


def _check_module(path: Path, config: PeftConfig, module: str, a: Tensor, b: Tensor) -> LoRAFactors:
    _check_target(path, config, module)
    for factor, tensor in (("lora_A", a), ("lora_B", b)):
        if tensor.dim() != 2 or 0 in tensor.shape:
            what = f"{path}: {factor} of {printable(module)}"
            raise AdapterError(f"{what} must have two dimensions (got shape {list(tensor.shape)})")
        _check_tensor(f"{path}: {factor} of {printable(module)}", tensor)
    _check_rank(f"{path}: lora_A of {printable(module)}", config, module, a, a.shape[0])
    _check_rank(f"{path}: lora_B of {printable(module)}", config, module, b, b.shape[1])
    return LoRAFactors(a, b, config.scale_of(module))


def _check_experts(
    path: Path, config: PeftConfig, module: str, a: Tensor, b: Tensor
) -> ExpertFactors:
    _check_target(path, config, module)
    if (a.dim(), b.dim()) == (2, 2):
        a, b = unflatten(f"{path}: factors of {printable(module)}", a, b, config.rank_of(module))
    for factor, tensor in (("lora_A", a), ("lora_B", b)):
        if tensor.dim() != 3 or 0 in tensor.shape:
            what = f"{path}: {factor} of {printable(module)}"
            raise AdapterError(
                f"{what} must have the axis of experts in both factors or be flat in both "
                f"(got shape {list(tensor.shape)})"
            )
        _check_tensor(f"{path}: {factor} of {printable(module)}", tensor)
    _check_rank(f"{path}: lora_A of {printable(module)}", config, module, a, a.shape[1])
    _check_rank(f"{path}: lora_B of {printable(module)}", config, module, b, b.shape[2])
    return ExpertFactors(a, b, config.scale_of(module))


def _check_target(path: Path, config: PeftConfig, module: str) -> None:
    targets = config.targets
    if not (targets.names_module(module) or targets.names_parameter(module)):
        rule = targets.modules
        nearest = "" if isinstance(rule, str) else hint(module.rpartition(".")[2], rule)
        raise AdapterError(
            f"{path}: {printable(module)} has factors, but target_modules of {CONFIG_FILE} does "
            f"not name it{nearest}"
        )


def _check_rank(what: str, config: PeftConfig, module: str, tensor: Tensor, rank: int) -> None:
    wanted = config.rank_of(module)
    if rank != wanted:
        key = config.rank_key_of(module)
        field = "r" if key is None else f"rank_pattern[{printable(repr(key))}]"
        raise AdapterError(
            f"{what} must have rank {wanted}, as {field} of {CONFIG_FILE} says "
            f"(got {rank} with shape {list(tensor.shape)})"
        )
    if wanted > MAX_RANK:
        raise AdapterError(f"{what} must have a rank of 1 to {MAX_RANK} (got {wanted})")


def _check_tensor(what: str, tensor: Tensor) -> None:
    if tensor.dtype not in _DTYPES:
        allowed = "float16, bfloat16 or float32"
        raise AdapterError(f"{what} must be {allowed} (got {str(tensor.dtype)[6:]})")
    if not tensor.isfinite().all():
        count = int((~tensor.isfinite()).sum())
        raise AdapterError(
            f"{what} must be finite (got {count} values of NaN or Inf among {tensor.numel()})"
        )
