"""What a subject must leave as it found it: settings of torch that all other code of a server uses.

A layer that seeds torch's generator in each step repeats what every sampler draws; one that leaves
gradients off, or another default dtype, changes code that it never calls. Loading an adapter may
draw numbers, as the initialisation of a module does; a step may not.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from loragate.protocol.error_origin import BrokenProtocol


def _generator() -> bytes:
    state = torch.get_rng_state()
    # no operator: while a step is recorded, that would be one of the subject
    return ctypes.string_at(state.data_ptr(), state.nbytes)


def _set_generator(state: bytes) -> None:
    torch.set_rng_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))


def _precision() -> str:
    # what torch.get_float32_matmul_precision raises for where somebody has set this one
    return str(torch.backends.cuda.matmul.fp32_precision)


def _set_precision(precision: str) -> None:
    torch.backends.cuda.matmul.fp32_precision = precision


_Setting = tuple[Callable[[], Any], Callable[[Any], object]]
_SETTINGS: Mapping[str, _Setting] = {
    "torch.is_grad_enabled()": (torch.is_grad_enabled, torch.set_grad_enabled),
    "torch.get_default_dtype()": (torch.get_default_dtype, torch.set_default_dtype),
    "torch.get_default_device()": (torch.get_default_device, torch.set_default_device),
    "torch.get_num_threads()": (torch.get_num_threads, torch.set_num_threads),
    "the precision of fp32 products on a GPU": (_precision, _set_precision),
}
_OF_STEPS: Mapping[str, _Setting] = {
    "torch's random generator on the host": (_generator, _set_generator),
}


@contextmanager
def unchanged_process(method: str, *, is_step: bool = False) -> Iterator[None]:
    """Raises BrokenProtocol, with everything as it was, if the code within has left one of the
    settings changed. `method` is what was called, and whether it belongs to a step. Of code that
    fails nothing is said."""
    settings = {**_SETTINGS, **(_OF_STEPS if is_step else {})}
    before = {name: get() for name, (get, _) in settings.items()}
    changed: list[str] = []
    try:
        yield
    finally:
        for name, (get, set_to) in settings.items():
            now = get()
            if now != before[name]:
                changed.append(f"{name}{_values(before[name], now)}")
                set_to(before[name])
    if changed:
        raise BrokenProtocol(
            f"{method} left {' and '.join(changed)}; expected all settings as before"
        )


def _values(before: Any, now: Any) -> str:
    return " in another state" if isinstance(before, bytes) else f" at {now} (before: {before})"
