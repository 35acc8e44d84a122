"""How many registers a thread takes in the launches of up to some hundred rows.

By itself ptxas takes few, so that many programs fit on a multiprocessor: of the values that a
program adds up, it loads a few, adds them, and loads the next ones. With a limit (`maxnreg` of
Triton), even the highest one, it issues all loads first. That is faster where a program waits for
its loads more than for its turn. The constants were measured on an H200, and are those of every
family: docs/benchmarks.md has the figures.
"""

from __future__ import annotations

import math

from lorakernels.dense.one_wave import FEW_RANKS, Work

# 32-bit registers of a multiprocessor, and most of a thread: compute capabilities 7.0 to 12.x, by
# the CUDA programming guide
_OF_A_MULTIPROCESSOR, _MOST = 1 << 16, 255
# an expand of up to 16 ranks needs fewer, which leaves place for a second program of eight warps;
# of more programs on a multiprocessor than these, more must run at once
_FEWEST_RANKS, _OF_FEWEST_RANKS, _PROGRAMS_OF_FEWEST_RANKS = 16, 128, 3
# what divides the widths of slices whose columns are loaded in vectors: others take more registers
_VECTOR = 8


def registers_of_shrink(work: Work, programs: int, num_warps: int) -> int | None:
    """programs: of a tile. None: the compiler chooses."""
    programs *= work.tiles
    if work.rank > FEW_RANKS and programs > work.multiprocessors:
        return None
    return _most(programs, num_warps, work)


def reads_all_ranks(work: Work, registers: int | None) -> bool:
    """Whether a shrink of so many registers reads A at all ranks of the buffers, before it is known
    how many an adapter has. That saves the latency of a load; of up to 16 ranks it costs few
    bytes."""
    return registers is not None and work.rank <= _FEWEST_RANKS


def registers_of_expand(work: Work, block: int, num_warps: int) -> int | None:
    """block: the columns of a program, which computes no others. None: the compiler chooses."""
    if work.rank > FEW_RANKS or math.gcd(_VECTOR, *work.slice_widths) < _VECTOR:
        return None
    programs = work.tiles * sum(-(-width // block) for width in work.slice_widths)
    if work.rank > _FEWEST_RANKS:
        return _most(programs, num_warps, work)
    few = programs <= _PROGRAMS_OF_FEWEST_RANKS * work.multiprocessors
    return _OF_FEWEST_RANKS if few else None


def _most(programs: int, num_warps: int, work: Work) -> int | None:
    """All, where so many programs then fit on the multiprocessors, as far as registers decide."""
    fitting = _OF_A_MULTIPROCESSOR // (32 * num_warps * _MOST)
    return _MOST if programs <= fitting * work.multiprocessors else None
