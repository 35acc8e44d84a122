"""What fresh memory holds while a test wants to see who reads it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from loragate.inputs.poison import marked_allocations, poisoned_allocations, zeroed_allocations

_MEMORY: Any = torch.utils.deterministic
_LARGEST = torch.iinfo(torch.int32).max


@pytest.fixture
def unmarked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the NaN of torch's own mode, in which the tests run: it would hide a missing fill."""
    monkeypatch.setattr(_MEMORY, "fill_uninitialized_memory", False)


def _mode() -> tuple[bool, bool, bool]:
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        bool(_MEMORY.fill_uninitialized_memory),
    )


def test_fresh_memory_holds_nan_and_the_largest_integer() -> None:
    _MEMORY.fill_uninitialized_memory = False
    try:
        with marked_allocations():
            assert torch.empty(3).isnan().all()
            assert torch.empty(3, dtype=torch.int32).tolist() == [_LARGEST] * 3
    finally:
        _MEMORY.fill_uninitialized_memory = True


@pytest.mark.usefixtures("unmarked")
@pytest.mark.parametrize(
    "allocate",
    [
        lambda like: torch.empty(3),
        # looked up when it is called
        lambda like: torch.empty_like(like),
        lambda like: torch.empty_permuted((3,), (0,)),
        lambda like: torch.empty_strided((3,), (1,)),
        lambda like: like.new_empty(3),
        lambda like: like.new_empty_strided((3,), (1,)),
    ],
    ids=[
        "empty",
        "empty_like",
        "empty_permuted",
        "empty_strided",
        "new_empty",
        "new_empty_strided",
    ],
)
def test_every_way_to_fresh_memory_is_filled(allocate: Callable[[Tensor], Tensor]) -> None:
    like = torch.ones(3)
    with poisoned_allocations():
        assert allocate(like).isnan().all()
    # may be the memory that was just given back, which holds NaN
    with zeroed_allocations():
        assert allocate(like).tolist() == [0.0] * 3


@pytest.mark.usefixtures("unmarked")
@pytest.mark.parametrize(
    "dtype",
    [
        torch.bfloat16,
        torch.float8_e4m3fn,
        torch.float8_e8m0fnu,
        torch.float4_e2m1fn_x2,
        torch.complex128,
        torch.int8,
        torch.uint64,
    ],
)
def test_fresh_memory_of_any_dtype_can_be_filled(dtype: torch.dtype) -> None:
    with poisoned_allocations():
        poisoned = torch.empty(2, dtype=dtype).view(torch.uint8)
    with zeroed_allocations():
        zeroed = torch.empty(2, dtype=dtype).view(torch.uint8)
    assert poisoned.tolist() != zeroed.tolist() == [0] * len(zeroed)


@pytest.mark.parametrize("before", [(False, False), (True, False), (True, True)])
def test_the_mode_of_the_caller_comes_back_after_an_error(before: tuple[bool, bool]) -> None:
    strict, warn_only = before
    torch.use_deterministic_algorithms(strict, warn_only=warn_only)
    mode = _mode()
    with pytest.raises(ZeroDivisionError), marked_allocations(warn_only=not warn_only):
        raise ZeroDivisionError
    assert _mode() == mode
