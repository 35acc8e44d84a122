"""Access to the installed vLLM package for dense LoRA. Nothing of it is copied here.

Invariant: a package that cannot be used gives a reason, never an exception, and importing it leaves
the environment variables as they were.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from loragate.core.machine import Machine
from lorakernels.runtime import interpreter

_PACKAGE = "vllm"
_OPS = "vllm.lora.ops.triton_ops"
# the option by which its layers put the work of adapters on a second stream
DUAL_STREAM = "VLLM_LORA_ENABLE_DUAL_STREAM"


@dataclass(frozen=True, slots=True, eq=False)
class VllmOps:
    """Entry points of vLLM's dense LoRA.

    `pointer_tables` are vLLM's module-wide caches for A and B, which are keyed by the addresses of
    the weights of all slices alone.
    """

    version: str
    lora_shrink: Callable[..., None]
    lora_expand: Callable[..., None]
    # LoRAKernelMeta, a class that cannot be named without the package
    kernel_meta: Any
    pointer_tables: tuple[dict[tuple[int, ...], object], dict[tuple[int, ...], object]]
    # a mode of vLLM without split-K, and thus without atomics
    batch_invariant: bool

    def forget(self, a: Sequence[Tensor], b: Sequence[Tensor]) -> None:
        """Drop what an earlier owner of these addresses left in the pointer tables.

        Other entries stay: a captured graph may still read their tensors.
        """
        for table, weights in zip(self.pointer_tables, (a, b), strict=True):
            table.pop(tuple(weight.data_ptr() for weight in weights), None)


def installed_version() -> str | None:
    """Version of the installed package, without importing it."""
    if importlib.util.find_spec(_PACKAGE) is None:
        return None
    try:
        return importlib.metadata.version(_PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def load_vllm(machine: Machine) -> VllmOps | str:
    """The package's operators, or the reason why they cannot run here."""
    version = installed_version()
    if version is None:
        return "vLLM is not installed; install the extra loragate[vllm]"
    if machine.interpreted and torch.cuda.is_available():
        return (
            "vLLM registers its operators for CUDA where it finds a GPU, so they refuse the CPU "
            "tensors of the interpreter; unset TRITON_INTERPRET"
        )
    try:
        return _load(version, machine.interpreted)
    except Exception as error:
        return f"vLLM {version} is installed but cannot be imported: {headline(error)}"


@cache
def _load(version: str, interpreted: bool) -> VllmOps | str:
    with importing(interpreted):
        ops = importlib.import_module(_OPS)
        utils = importlib.import_module(f"{_OPS}.utils")
        triton_utils = importlib.import_module("vllm.triton_utils")
    if not triton_utils.HAS_TRITON:
        return f"vLLM {version} found no usable Triton when it was first imported"
    if interpreted:
        # vLLM multiplies bf16 operands directly, which the interpreter gets wrong without a repair
        interpreter.repair()
        # vLLM pins memory wherever the build has CUDA, with or without a device
        torch_utils: Any = importlib.import_module("vllm.utils.torch_utils")
        torch_utils.PIN_MEMORY = False
        shrink: Any = importlib.import_module(f"{_OPS}.lora_shrink_op")
        shrink.get_lora_op_configs = fewer_splits(shrink.get_lora_op_configs)
    return VllmOps(
        version=version,
        lora_shrink=ops.lora_shrink,
        lora_expand=ops.lora_expand,
        kernel_meta=ops.LoRAKernelMeta,
        pointer_tables=(utils._LORA_A_PTR_DICT, utils._LORA_B_PTR_DICT),
        batch_invariant=bool(utils.is_batch_invariant),
    )


def fold_scale(b: Tensor, scale: float) -> Tensor:
    """scale * B as vLLM stores it: multiplied in fp32, rounded once to B's dtype."""
    return (b.float() * scale).to(b.dtype)


def fewer_splits(configs: Callable[..., Mapping[str, Any]]) -> Callable[..., dict[str, Any]]:
    """Tile sizes for the interpreter: as many splits as K can fill, and one that stays empty.

    By default 64 programs share a K that fits into one of them; the others add nothing and cost as
    much. vLLM lets its users tune tile sizes.
    """

    def chosen(operation: str, **shape: int) -> dict[str, Any]:
        config = dict(configs(operation, **shape))
        filled = -(-shape["hidden_size"] // config["block_k"])
        config["split_k"] = min(config["split_k"], filled + 1)
        return config

    return chosen


@contextmanager
def importing(interpreted: bool) -> Iterator[None]:
    """The environment that the package is imported in; afterwards the previous one."""
    with environment(_import_environment(interpreted)):
        yield


def _import_environment(interpreted: bool) -> Mapping[str, str]:
    # a warning about missing tuned tiles helps nobody, and the terminal belongs to the gate; its
    # linear layers have a form of two streams only if the option is on while they are imported
    quiet = {"VLLM_LOGGING_LEVEL": "ERROR", DUAL_STREAM: "1"}
    # without a driver vLLM replaces Triton with a placeholder unless all devices are hidden
    return quiet | {"CUDA_VISIBLE_DEVICES": ""} if interpreted else quiet


@contextmanager
def environment(changes: Mapping[str, str]) -> Iterator[None]:
    """Environment variables with other values; afterwards they are as before."""
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def headline(error: Exception) -> str:
    """Type and first line of an error."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0] if text else 'no message'}"
