"""Whether a graph that vLLM captures is one for batches without adapters.

vLLM captures such graphs beside those for adapters, from dummy runs of base rows. The rows of a
mapping must not decide: a dummy run that lacked its adapters by mistake captured graphs for
adapters without any kernel of them, and each replay served the base model (vllm #43139, #43314).
What decides is the number of adapters that vLLM asks its dummy run for.

A dummy run declares this of the layers whose wrapper it maps. Those of towers and connectors have
wrappers of their own, whose graphs vLLM 0.26 captures behind those of the language model and
without a dummy selection (gpu_model_runner.py, `capture_model`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from lorakernels.integrations.vllm.launches import Operator, count
from lorakernels.integrations.vllm.tables import host_value
from lorakernels.runtime.streams import is_capturing


class Declaration:
    """The number of adapters that the last dummy run was asked for, until a mapping is installed
    without a dummy run; None where nothing is known. Of the wrapper that was mapped last."""

    def __init__(self) -> None:
        self._adapters: int | None = None
        self._is_dummy = False
        # a wrapper is known by its flags, which operators are given
        self._mapped = frozenset[int]()

    @contextmanager
    def dummy_run(self, adapters: int) -> Iterator[None]:
        """Within, mappings are those of a dummy run. What it declares outlasts it: vLLM's second
        model runner captures behind it."""
        self._adapters, self._is_dummy = adapters, True
        try:
            yield
        finally:
            self._is_dummy = False

    def mapping_installed(self, *flags: Tensor) -> None:
        """flags: those of the wrapper that got the mapping. A dummy run whose mapping the wrapper
        has already installs none."""
        self._mapped = frozenset(flag.data_ptr() for flag in flags)
        if not self._is_dummy:
            self._adapters = None

    def is_of(self, flag: Tensor) -> bool:
        """Whether the wrapper of the flag was mapped last."""
        return flag.data_ptr() in self._mapped

    def without_adapters(self, flag: Tensor) -> bool:
        return self._adapters == 0 and self.is_of(flag)


# of the model runner of this process
DECLARATION = Declaration()


def runs_adapters(operator: Operator, device: torch.device, no_lora: Tensor) -> bool:
    """Whether an operator launches its kernels now. `no_lora` is vLLM's flag, a bool on the CPU:
    the installed mapping has no adapter."""
    captures = is_capturing(device)
    leaves_out = DECLARATION.without_adapters(no_lora) if captures else host_value(no_lora) != 0
    count(operator, runs=not leaves_out, captures=captures)
    return not leaves_out


def may_map_more_rows(no_lora: Tensor, device: torch.device) -> bool:
    """Whether a step may map more rows than the graph has that is captured now: the graph of a
    tower, whose steps have any number of images. `no_lora` as above."""
    return not DECLARATION.is_of(no_lora) and is_capturing(device)
