"""Tensors that the interpreter takes for those of a device: it copies them to the host and back."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor


class FarTensor(Tensor):
    """Memory of its own is on the host, and that of the first tensor is not."""

    _far: int

    @property
    def is_cpu(self) -> bool:  # type: ignore[override]
        return getattr(self, "_far", 0) != self.untyped_storage().data_ptr()


def far(tensor: Tensor) -> Tensor:
    """A view of `tensor` that says that its memory is not on the host."""
    view = tensor.as_subclass(FarTensor)
    view._far = tensor.untyped_storage().data_ptr()
    return view


@pytest.fixture
def copied_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that is taken to the host is copied, as that of a device is."""
    monkeypatch.setattr(torch.UntypedStorage, "cpu", lambda storage: storage.clone())
