"""A plugin whose workers take the processor for a GPU of little memory, and write down its use."""

from __future__ import annotations

import os
from collections.abc import Generator
from unittest.mock import patch

import pytest

from loragate.plugin import memory


class _Allocator:
    total = 3 << 29

    def __init__(self) -> None:
        self._use = f"{os.environ['MEMORY_USE']}.{os.environ['PYTEST_XDIST_WORKER']}"

    def limit(self, size: int) -> None:
        self._write("more" if size > self.total // 2 else "less")

    def trim(self) -> None:
        self._write("trim")

    def _write(self, line: str) -> None:
        with open(self._use, "a") as file:
            file.write(f"{line}\n")


@pytest.hookimpl(wrapper=True)
def pytest_sessionstart() -> Generator[None, None, None]:
    with (
        patch("torch.cuda.is_available", lambda: True),
        patch.object(memory, "TorchAllocator", _Allocator),
    ):
        return (yield)
