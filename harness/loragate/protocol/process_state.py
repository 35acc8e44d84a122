"""What a subject must leave as it found it: settings that all other code of a server uses.

A layer that seeds a generator in each step repeats what every sampler draws; one that leaves
gradients off, or another default dtype, changes code that it never calls. Opening an instance and
loading an adapter may draw numbers, as the initialisation of a module does; a step may not.
"""

from __future__ import annotations

import ctypes
import random
import sys
from collections.abc import Callable, Mapping
from types import TracebackType
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


def _set_deterministic(mode: tuple[bool, bool]) -> None:
    enabled, warns_only = mode
    torch.use_deterministic_algorithms(enabled, warn_only=warns_only)


def _flushes_subnormals() -> bool:
    # torch cannot be asked. It sets a mode of the processor, in which Python computes as well
    return sys.float_info.min * _HALF == 0.0


# not a literal, with which a compiler would compute ahead
_HALF = float("0.5")

_Setting = tuple[Callable[[], Any], Callable[[Any], object]]
_SETTINGS: Mapping[str, _Setting] = {
    "torch.is_grad_enabled()": (torch.is_grad_enabled, torch.set_grad_enabled),
    "torch.get_default_dtype()": (torch.get_default_dtype, torch.set_default_dtype),
    "torch.get_default_device()": (torch.get_default_device, torch.set_default_device),
    "torch.get_num_threads()": (torch.get_num_threads, torch.set_num_threads),
    "the precision of fp32 products on a GPU": (_precision, _set_precision),
    "autocast on the host": (
        lambda: torch.is_autocast_enabled("cpu"),
        lambda enabled: torch.set_autocast_enabled("cpu", enabled),
    ),
    "autocast on a GPU": (
        lambda: torch.is_autocast_enabled("cuda"),
        lambda enabled: torch.set_autocast_enabled("cuda", enabled),
    ),
    "torch.use_deterministic_algorithms": (
        lambda: (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        ),
        _set_deterministic,
    ),
    "torch.set_flush_denormal": (_flushes_subnormals, torch.set_flush_denormal),
}
_OF_STEPS: Mapping[str, _Setting] = {
    "torch's random generator on the host": (_generator, _set_generator),
    "Python's random generator": (random.getstate, random.setstate),
}


class _UnchangedProcess:
    # a class, because contextlib assigns to exceptions, and a frozen dataclass of a subject's
    # refuses that
    def __init__(self, method: str, settings: Mapping[str, _Setting]) -> None:
        self._method, self._settings = method, settings
        self._before: dict[str, Any] = {}

    def __enter__(self) -> None:
        self._before = {name: get() for name, (get, _) in self._settings.items()}

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        changed = []
        for name, (get, set_to) in self._settings.items():
            before, now = self._before[name], get()
            if now != before:
                changed.append(f"{name}{_values(name, before, now)}")
                set_to(before)
        if changed and error is None:
            raise BrokenProtocol(
                f"{self._method} left {' and '.join(changed)}; expected all settings as before"
            )


def unchanged_process(method: str, *, is_step: bool = False) -> _UnchangedProcess:
    """Raises BrokenProtocol, with everything as it was, if the code within has left one of the
    settings changed. `method` is what was called, and whether it belongs to a step. Of code that
    fails nothing is said."""
    return _UnchangedProcess(method, {**_SETTINGS, **(_OF_STEPS if is_step else {})})


def _values(name: str, before: Any, now: Any) -> str:
    return " in another state" if name in _OF_STEPS else f" at {now} (before: {before})"
