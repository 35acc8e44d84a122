"""What a compiled kernel occupies on a GPU. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Resources:
    """What one thread (registers, spilled bytes) and one block (shared memory) occupy."""

    registers: int
    spills: int
    shared_bytes: int
