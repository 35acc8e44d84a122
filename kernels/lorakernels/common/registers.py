"""How many registers a thread of a launch may take. Pure."""

from __future__ import annotations

# 32-bit registers of a multiprocessor, and most of a thread: compute capabilities 7.0 to 12.x, by
# the CUDA programming guide
_OF_A_MULTIPROCESSOR = 1 << 16
_MOST = 255


def most_registers(programs: int, num_warps: int, multiprocessors: int) -> int | None:
    """As many as a thread can have, as Triton's `maxnreg` takes them, where all programs of a
    launch then still run at once; otherwise None, and the compiler chooses.

    By itself ptxas takes few registers, so that many programs fit on a multiprocessor, and loads
    what is added up one value after the other: 32 split-K partials take the latency of several
    loads. With a limit, even the highest one, it issues all of them first.
    """
    fitting = _OF_A_MULTIPROCESSOR // (32 * num_warps * _MOST)
    return _MOST if programs <= fitting * multiprocessors else None
