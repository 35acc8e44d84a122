"""Which kernels Triton compiles while something runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def kernels_compiled(names: list[str]) -> Iterator[None]:
    """Collects the kernels that Triton compiles or fetches from its cache on disk."""
    from triton import knobs

    def listen(*, src: Any, **_: Any) -> None:
        names.append(src.name)

    before = knobs.compilation.listener
    knobs.compilation.listener = listen
    try:
        yield
    finally:
        knobs.compilation.listener = before
