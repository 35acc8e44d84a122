"""The digest of a weight is that of all of its bytes, however many rows it has."""

from __future__ import annotations

import hashlib

import pytest
import torch

from lorakernels.common.digests import DTYPES, SavedWeight, digest_in


@pytest.mark.parametrize("rows", [1, 4095, 4096, 4097, 12289])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_digest_is_that_of_the_bytes_of_all_rows(rows: int, dtype: torch.dtype) -> None:
    weight = torch.randn(rows, 3, generator=torch.Generator().manual_seed(rows))
    whole = weight.to(dtype).view(torch.uint8).numpy().tobytes()
    assert digest_in(dtype, weight) == hashlib.sha256(whole).digest()


@pytest.mark.parametrize("row", [0, 4095, 4096, 8191, 8192, 8999])
def test_a_change_of_any_row_changes_the_digest_in_each_dtype(row: int) -> None:
    weight = torch.zeros(9000, 2)
    changed = weight.clone()
    changed[row, 1] = 1.0
    before, after = SavedWeight.of(weight).digests, SavedWeight.of(changed).digests
    assert all(before[dtype] != after[dtype] for dtype in DTYPES)


def test_a_weight_that_is_a_view_has_the_digest_of_its_values() -> None:
    wide = torch.arange(24.0).view(4, 6)
    for view in (wide[:, 1:3], wide.T, wide[::2]):
        assert digest_in(torch.float32, view) == digest_in(torch.float32, view.clone())
