"""Where a large tensor of random numbers may be cut, so that its pieces, drawn one after the other
from one generator, are bit for bit the tensor drawn at once.

On a CPU torch draws one number after the other; only `randn` makes them in groups, and the last
group anew where it is not full. On a GPU a kernel draws in rounds: each thread takes four numbers
of its own stream a round, which are as many elements apart as there are threads. A piece of whole
rounds leaves the generator where the next round begins. A tensor whose last byte is beyond 32 bits
is drawn in halves, halves of halves and so on, after the generator has been moved on by the rounds
of the whole tensor, which nothing uses. All that is how torch 2.11 to 2.13 draw; a test compares
it with what they draw.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

# elements that are drawn at a time: at most
_PIECE = 1 << 24
# what `randn` makes at a time on a CPU
_CPU_GROUP = 16
# threads of a block, numbers that a thread takes a round, and the generator's offset for them
_BLOCK, _PER_THREAD, _OFFSET = 256, 4, 4
_MAX_BYTES = (1 << 31) - 1


def pieces_of(size: int, dtype: torch.dtype, generator: torch.Generator) -> Iterator[slice]:
    """The places of the pieces of a tensor of `size` elements that is drawn in `dtype`. The numbers
    of a piece must be drawn before the next one is asked for."""
    if generator.device.type == "cpu":
        yield from _cut(range(size), _PIECE)
        return
    threads = _threads(generator.device)
    blocks = halves(range(size), dtype.itemsize)
    if len(blocks) > 1:
        skipped = rounds(size, threads) * _OFFSET
        generator.set_offset(generator.get_offset() + skipped)
    step = max(_PIECE // (threads * _PER_THREAD), 1) * threads * _PER_THREAD
    for block in blocks:
        yield from _cut(block, step)


def _threads(device: torch.device) -> int:
    """How many threads draw a large tensor on a GPU."""
    properties = torch.cuda.get_device_properties(device)
    per_processor = properties.max_threads_per_multi_processor // _BLOCK * _BLOCK
    return int(properties.multi_processor_count * per_processor)


def rounds(size: int, threads: int) -> int:
    """How many rounds a kernel of at most that many threads takes for a tensor."""
    threads = min(threads, -(-size // _BLOCK) * _BLOCK)
    return -(-size // (threads * _PER_THREAD))


def halves(block: range, itemsize: int) -> list[range]:
    """The parts of a tensor that a GPU draws one after the other, since it counts bytes in 32 bits:
    mostly one."""
    if (len(block) - 1) * itemsize + 1 <= _MAX_BYTES:
        return [block]
    middle = len(block) // 2
    return [*halves(block[:middle], itemsize), *halves(block[middle:], itemsize)]


def _cut(block: range, step: int) -> Iterator[slice]:
    """Slices of `step` elements, with a rest that is too small for a group in the last one."""
    start = block.start
    while start < block.stop:
        stop = start + step
        stop = block.stop if block.stop - stop < _CPU_GROUP else stop
        yield slice(start, stop)
        start = stop
