"""Tensors that the interpreter takes for those of a device: it copies them to the host and back."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

# by their addresses. They are kept, so that nothing else comes to their places
_FAR: dict[int, torch.UntypedStorage] = {}


class FarTensor(Tensor):
    """Memory that `far` has seen is not on the host, and a copy of it is."""

    @property
    def is_cpu(self) -> bool:  # type: ignore[override]
        return self.untyped_storage().data_ptr() not in _FAR


def far(tensor: Tensor) -> Tensor:
    """A view of `tensor` that says that its memory is not on the host. A test that asks for it
    needs `copied_memory`, which forgets it afterwards."""
    storage = tensor.untyped_storage()
    _FAR[storage.data_ptr()] = storage
    return tensor.as_subclass(FarTensor)


def _on_host(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    # as for a device: what is on the host already is not copied
    return storage.clone() if storage.data_ptr() in _FAR else storage


@pytest.fixture
def copied_memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Memory of `far` tensors that is taken to the host is copied, as that of a device is."""
    monkeypatch.setattr(torch.UntypedStorage, "cpu", _on_host)
    yield
    _FAR.clear()
