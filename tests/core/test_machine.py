from __future__ import annotations

import os

import pytest
import torch

from loragate.core.machine import select_interpreter

LARGEST_ISA = "ONEDNN_MAX_CPU_ISA"

# before the first product of this process
select_interpreter()


@pytest.mark.parametrize("given", [None, "AVX2"])
def test_beside_the_interpreter_products_keep_off_amx_unless_the_user_says_otherwise(
    given: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.delenv(LARGEST_ISA, raising=False)
    if given is not None:
        monkeypatch.setenv(LARGEST_ISA, given)
    select_interpreter()
    assert os.environ[LARGEST_ISA] == (given or "AVX512_CORE_BF16")


def test_without_the_interpreter_products_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.delenv(LARGEST_ISA, raising=False)
    select_interpreter()
    assert LARGEST_ISA not in os.environ


@pytest.mark.skipif("TRITON_INTERPRET" not in os.environ, reason="products run on the GPU here")
@pytest.mark.parametrize("columns", [16, 40, 72])
@pytest.mark.parametrize("depth", [33, 40, 48, 64])
def test_a_padded_row_of_nan_does_not_reach_the_row_before_it(depth: int, columns: int) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(17, depth, generator=generator).bfloat16()
    weight = torch.randn(columns, depth, generator=generator).bfloat16()
    x[5:] = float("nan")
    assert torch.nn.functional.linear(x, weight)[:5].isfinite().all()
