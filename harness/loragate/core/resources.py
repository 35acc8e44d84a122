"""Resources that a compiled kernel uses on a GPU. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Resources:
    """Registers and spilled bytes of one thread, shared memory of one block."""

    registers: int
    spills: int
    shared_bytes: int
