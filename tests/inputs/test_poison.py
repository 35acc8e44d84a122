"""What fresh memory holds while a test wants to see who reads it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from loragate.inputs.poison import marked_allocations

_MEMORY: Any = torch.utils.deterministic
_LARGEST = torch.iinfo(torch.int32).max


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


@pytest.mark.parametrize("before", [(False, False), (True, False), (True, True)])
def test_the_mode_of_the_caller_comes_back_after_an_error(before: tuple[bool, bool]) -> None:
    strict, warn_only = before
    torch.use_deterministic_algorithms(strict, warn_only=warn_only)
    mode = _mode()
    with pytest.raises(ZeroDivisionError), marked_allocations(warn_only=not warn_only):
        raise ZeroDivisionError
    assert _mode() == mode
