"""The tensors that a step reads, at fixed addresses, and the one copy that fills them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lorakernels.runtime.device import keep_address
from lorakernels.runtime.staging import Staging

TOKEN_SLOTS = "token_slots"
# every tensor starts at a multiple of this, which torch's own allocations are aligned to on a GPU
_ALIGNMENT = 512
# what numpy takes the elements of a tensor for: it does not know all dtypes of torch
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_INTEGERS = frozenset(_BITS.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class InputSpec:
    """An input of a step: [max_tokens, *shape], or [1, *shape] where it is not `per_token`.
    `padding` is what rows without a token hold."""

    dtype: torch.dtype
    shape: tuple[int, ...] = ()
    per_token: bool = True
    padding: float = 0


class StepInputs:
    """Static device tensors by name, and `token_slots`, int32 [max_tokens]: all parts of one block,
    which `write` fills with one copy that nothing waits for.

    The block is copied whole. So every row behind the live ones holds its padding, -1 in
    `token_slots`, whatever the step before has left there.
    """

    def __init__(
        self,
        specs: Mapping[str, InputSpec],
        *,
        max_tokens: int,
        device: torch.device | str,
    ) -> None:
        if max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1 (got {max_tokens})")
        if TOKEN_SLOTS in specs:
            raise ValueError(f"specs must not name {TOKEN_SLOTS}, which every step has")
        for name, spec in specs.items():
            if spec.dtype.itemsize not in _BITS:
                raise ValueError(f"dtype of {name} must have 1 to 8 bytes (got {spec.dtype})")
        self.max_tokens = max_tokens
        self.specs = {**specs, TOKEN_SLOTS: InputSpec(dtype=torch.int32, padding=-1)}
        size = sum(_aligned(spec, max_tokens) for spec in self.specs.values())
        # what a write fills before it is copied; no copy in flight reads it
        host = torch.zeros(size, dtype=torch.uint8, device="cpu")
        self._host = host.numpy()
        self._host_parts = {name: _bits(part) for name, part in self._cut(host).items()}
        self._padding = {
            name: _bits(torch.tensor([spec.padding], dtype=spec.dtype, device="cpu"))
            for name, spec in self.specs.items()
        }
        self._staging = Staging()
        self.block = keep_address(torch.empty(size, dtype=torch.uint8, device=device))
        self.tensors = {name: keep_address(part) for name, part in self._cut(self.block).items()}
        self._live = 0
        self.reset()

    def __getitem__(self, name: str) -> Tensor:
        """The static tensor of that name."""
        return self.tensors[name]

    @property
    def token_slots(self) -> Tensor:
        return self.tensors[TOKEN_SLOTS]

    @property
    def num_bytes(self) -> int:
        """Bytes on the device."""
        return self.block.untyped_storage().nbytes()

    def write(self, token_slots: Tensor, values: Mapping[str, Tensor]) -> None:
        """Queue the inputs of the next step on the current stream.

        token_slots: int32 [live rows]; `values`: for every spec a tensor [live rows, *shape], or
        [1, *shape], of its dtype. All are on the CPU, and may be overwritten at once.
        Raises ValueError with nothing changed.
        """
        live = token_slots.shape[0] if token_slots.dim() else 0
        given = {**values, TOKEN_SLOTS: token_slots}
        self._check(given, live)
        for name, part in self._host_parts.items():
            if not self.specs[name].per_token:
                part[:] = _bits(given[name])
                continue
            part[:live] = _bits(given[name])
            if live < self._live:
                # rows of the step before; all behind them hold their padding already
                part[live : self._live] = self._padding[name]
        self._live = live
        self._staging.upload(self._host, self.block)

    def reset(self, token_slots: Sequence[int] = ()) -> None:
        """Queue padding for all rows, of which the first ones have these slots."""
        for name, part in self._host_parts.items():
            part[:] = self._padding[name]
        self._host_parts[TOKEN_SLOTS][: len(token_slots)] = token_slots
        self._live = len(token_slots)
        self._staging.upload(self._host, self.block)

    def _check(self, given: Mapping[str, Tensor], live: int) -> None:
        if live > self.max_tokens:
            raise ValueError(f"a step may have {self.max_tokens} rows, max_tokens (got {live})")
        if given.keys() != self.specs.keys():
            wanted, found = ", ".join(sorted(self.specs)), ", ".join(sorted(given))
            raise ValueError(f"inputs must be {wanted} (got {found})")
        for name, tensor in given.items():
            spec = self.specs[name]
            shape = (live if spec.per_token else 1, *spec.shape)
            if tensor.shape != shape or tensor.dtype != spec.dtype or not tensor.is_cpu:
                raise ValueError(
                    f"{name} must be {spec.dtype} {list(shape)} on cpu "
                    f"(got {tensor.dtype} {list(tensor.shape)} on {tensor.device})"
                )
            if tensor.layout is not torch.strided or tensor.is_neg() or tensor.is_conj():
                raise ValueError(
                    f"{name} must hold its values in memory, one for each element, as to_dense, "
                    f"resolve_neg and resolve_conj give them (got {tensor.layout}, "
                    f"is_neg() {tensor.is_neg()}, is_conj() {tensor.is_conj()})"
                )

    def _cut(self, block: Tensor) -> dict[str, Tensor]:
        parts, start = {}, 0
        for name, spec in self.specs.items():
            size = _size(spec, self.max_tokens)
            rows = self.max_tokens if spec.per_token else 1
            parts[name] = block[start : start + size].view(spec.dtype).view(rows, *spec.shape)
            start += _aligned(spec, self.max_tokens)
        return parts


def _bits(tensor: Tensor) -> NDArray[np.generic]:
    """The memory of a CPU tensor, as integers."""
    dtype = tensor.dtype
    return (tensor if dtype in _INTEGERS else tensor.view(_BITS[dtype.itemsize])).numpy()


def _size(spec: InputSpec, max_tokens: int) -> int:
    rows = max_tokens if spec.per_token else 1
    return rows * math.prod(spec.shape) * spec.dtype.itemsize


def _aligned(spec: InputSpec, max_tokens: int) -> int:
    return -(-_size(spec, max_tokens) // _ALIGNMENT) * _ALIGNMENT
