"""Launches that are noted in place of being made, so that their kernels can be compiled ahead, or
the launches made again with other tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, eq=False)
class Launch:
    """A kernel of Triton with the arguments of a launch. It keeps the tensors among them alive."""

    kernel: Any
    grid: Sequence[int]
    args: tuple[Any, ...]
    options: Mapping[str, Any]

    @property
    def name(self) -> str:
        return str(self.kernel.fn.__name__)

    def compile(self) -> Any:
        """The kernel as it is compiled for these arguments, without a launch. Within Triton's
        AsyncCompileMode this returns at once. Does nothing in the interpreter."""
        return self.kernel.warmup(*self.args, grid=(1,), **self.options)


_NOTED: ContextVar[list[Launch] | None] = ContextVar("lorakernels_noted_launches", default=None)


@contextmanager
def noted_launches() -> Iterator[list[Launch]]:
    """Within, launches that begin with `start` are noted in the list and nothing else: tensors that
    they would have written hold anything."""
    launches: list[Launch] = []
    token = _NOTED.set(launches)
    try:
        yield launches
    finally:
        _NOTED.reset(token)


def is_noting() -> bool:
    """Whether launches are noted now."""
    return _NOTED.get() is not None


def start(kernel: Any, grid: Sequence[int]) -> Callable[..., Any]:
    """What launches a kernel with arguments and options, as `kernel[grid]` does."""
    noted = _NOTED.get()
    if noted is None:
        launch: Callable[..., Any] = kernel[grid]
        return launch

    def note(*args: Any, **options: Any) -> None:
        noted.append(Launch(kernel, grid, args, options))

    return note
