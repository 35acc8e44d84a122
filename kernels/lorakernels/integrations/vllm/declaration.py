"""Whether a graph that vLLM captures is one for batches without adapters.

vLLM captures such graphs beside those for adapters, from dummy runs of base rows. The rows of a
mapping must not decide: a dummy run that lacked its adapters by mistake captured graphs for
adapters without any kernel of them, and each replay served the base model (vllm #43139, #43314).
What decides is the number of adapters that vLLM asks its dummy run for.
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
    without a dummy run; None where nothing is known."""

    def __init__(self) -> None:
        self._adapters: int | None = None
        self._is_dummy = False

    @contextmanager
    def dummy_run(self, adapters: int) -> Iterator[None]:
        """Within, mappings are those of a dummy run. What it declares outlasts it: vLLM's second
        model runner captures behind it."""
        self._adapters, self._is_dummy = adapters, True
        try:
            yield
        finally:
            self._is_dummy = False

    def mapping_installed(self) -> None:
        if not self._is_dummy:
            self._adapters = None

    @property
    def without_adapters(self) -> bool:
        return self._adapters == 0


# of the model runner of this process
DECLARATION = Declaration()


def runs_adapters(operator: Operator, device: torch.device, no_lora: Tensor) -> bool:
    """Whether an operator launches its kernels now. `no_lora` is vLLM's flag, a bool on the CPU:
    the installed mapping has no adapter."""
    captures = is_capturing(device)
    leaves_out = DECLARATION.without_adapters if captures else host_value(no_lora) != 0
    count(operator, runs=not leaves_out, captures=captures)
    return not leaves_out
