"""Parts of tensors that a rank holds."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lorakernels.layers.packing import owned


@pytest.mark.parametrize(
    ("shape", "part"),
    [
        # a part of one row, or of one expert, lies as a whole tensor would
        ((1, 8), (slice(None), slice(0, 4))),
        ((1, 6, 4), (slice(None), slice(0, 3))),
        ((6, 4), (slice(0, 3),)),
        ((6, 4), (slice(None), slice(0, 2))),
    ],
)
def test_a_part_is_copied_so_that_the_whole_may_be_freed(
    shape: tuple[int, ...], part: tuple[slice, ...]
) -> None:
    whole = torch.randn(shape)
    own = owned(whole[part], whole)
    assert torch.equal(own, whole[part])
    assert own.untyped_storage().nbytes() == own.nbytes


def test_what_is_whole_is_not_copied() -> None:
    whole: Tensor = torch.randn(6, 4)
    assert owned(whole, whole).data_ptr() == whole.data_ptr()
