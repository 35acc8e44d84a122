"""Switching the plug-in on: what is replaced in vLLM, once for each process.

vLLM loads plug-ins in every process, some of them several times. Everything is checked before
anything is replaced.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from lorakernels.integrations.vllm.adoption import LOGGER, adopt, refusal_of_server
from lorakernels.integrations.vllm.contract import (
    WRAPPER,
    UnsupportedVllmError,
    check_seams,
    check_version,
)
from lorakernels.integrations.vllm.declaration import DECLARATION
from lorakernels.integrations.vllm.methods import LoraKernelsMethods
from lorakernels.runtime.options import BATCH_INVARIANT, batch_invariant

__all__ = ["SWITCH", "UnsupportedVllmError", "register"]

SWITCH = "LORAKERNELS_VLLM"
VLLMS_BATCH_INVARIANT = "VLLM_BATCH_INVARIANT"
_OURS = "lorakernels.integrations.vllm.wrapper.LoraKernelsWrapper"


def register() -> None:
    """Let vLLM serve LoRA with these kernels, unless the variable of SWITCH is 0.

    Does nothing on a platform without CUDA, and nothing when called again. Raises
    UnsupportedVllmError, with nothing changed, for a vLLM that the plug-in was not made for, and
    ValueError for another value of the variable.
    """
    if not _is_on():
        return
    platform = import_module("vllm.platforms").current_platform
    if not platform.is_cuda() or platform.get_punica_wrapper() == _OURS:
        return
    check_version(import_module("vllm").__version__)
    check_seams()
    if platform.get_punica_wrapper() != WRAPPER:
        raise UnsupportedVllmError(
            f"another plug-in has replaced {WRAPPER} by {platform.get_punica_wrapper()}; "
            f"{SWITCH}=0 leaves it in place"
        )
    let_layers_adopt()
    _keep_vllms_promise()
    runner = import_module("vllm.v1.worker.lora_model_runner_mixin").LoRAModelRunnerMixin
    runner.maybe_select_dummy_loras = _declaring(runner.maybe_select_dummy_loras)
    config = import_module("vllm.config.vllm").VllmConfig
    config.compute_hash = _with_factor(config.compute_hash)
    # last: it says that all is done
    type(platform).get_punica_wrapper = classmethod(lambda cls: _OURS)
    LOGGER.info("lorakernels is registered; %s=0 switches it off.", SWITCH)


def let_layers_adopt() -> None:
    """Let each layer of vLLM that gets a wrapper of ours be adopted by it. Other wrappers see no
    difference."""
    layer = import_module("vllm.lora.layers.base").BaseLayerWithLoRA
    if not hasattr(layer.set_mapping, "adopts"):
        layer.set_mapping = _adopting(layer.set_mapping)


def compile_factor() -> str:
    """What vLLM's caches of compiled graphs must depend on: a graph holds calls of our operators
    with the arguments that this package gives them. How many tables a mapping has among these
    follows from the option, too."""
    digest = hashlib.sha256(str(batch_invariant()).encode())
    for source in sorted(Path(__file__).parents[2].rglob("*.py")):
        digest.update(source.read_bytes())
    return digest.hexdigest()


def _is_on() -> bool:
    value = os.environ.get(SWITCH, "1")
    if value not in ("0", "1"):
        raise ValueError(f"{SWITCH} must be 0 or 1 (got {value!r})")
    return value == "1"


def _keep_vllms_promise() -> None:
    """vLLM's option for the same bits in a batch of any size holds for its own kernels of LoRA, so
    it must hold for these, unless the user has said otherwise."""
    if int(os.environ.get(VLLMS_BATCH_INVARIANT, "0")):
        os.environ.setdefault(BATCH_INVARIANT, "1")


def _adopting(inner: Callable[..., None]) -> Callable[..., None]:
    """`set_mapping` of a layer: before it keeps its wrapper, and a MoE layer its stacks."""

    @functools.wraps(inner)
    def set_mapping(self: Any, punica_wrapper: Any) -> None:
        if isinstance(punica_wrapper, LoraKernelsMethods):
            punica_wrapper = adopt(self, punica_wrapper)
        inner(self, punica_wrapper)

    set_mapping.adopts = True  # type: ignore[attr-defined]
    return set_mapping


def _declaring(inner: Callable[..., Any]) -> Callable[..., Any]:
    """`maybe_select_dummy_loras` of a runner, which is a context manager."""
    signature = inspect.signature(inner)

    @functools.wraps(inner)
    @contextmanager
    def maybe_select_dummy_loras(*args: Any, **kwargs: Any) -> Iterator[Any]:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        adapters = int(bound.arguments["num_active_loras"])
        with DECLARATION.dummy_run(adapters), inner(*args, **kwargs) as value:
            yield value

    return maybe_select_dummy_loras


def _with_factor(inner: Callable[..., str]) -> Callable[..., str]:
    """`compute_hash` of a configuration, which names the folder of its compiled graphs."""

    @functools.wraps(inner)
    def compute_hash(self: Any, *args: Any, **kwargs: Any) -> str:
        found = inner(self, *args, **kwargs)
        if self.lora_config is None:
            return found
        factors = f"{found} {compile_factor()} {refusal_of_server(self)}"
        digest = hashlib.sha256(factors.encode())
        return digest.hexdigest()[: len(found)]

    return compute_hash
