"""The blocks of memory that a trace touches: one for each storage, from first use to end."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from loragate.execution.trace.spans import Spans, strided

# of a strided view that has more bytes between its rows than that: from its first to its last byte
_MOST_SPANS = 1 << 14
# NaN for floats, and -1, which reaches no memory far away where it is used as an index
_POISON = 0xFF


@dataclass(slots=True)
class Block:
    number: int
    name: str
    # on which it was allocated: its memory goes back to that stream
    stream: int
    start: int
    size: int
    # of the host: what uses nothing else is done by the host itself
    on_host: bool
    weak: StorageWeakRef
    # the graph within whose capture it was allocated, which keeps its memory
    graph: int | None = None
    # allocated by an operator that was recorded
    is_fresh: bool = False
    # bytes before the trace, if they are kept; None: allocated within the trace, or not kept
    before: Tensor | None = None
    # keeps the memory alive
    storage: torch.UntypedStorage | None = None


class Blocks:
    """`device`: "cuda", or "cpu" where streams are modelled; there, memory is that of the device
    unless it is said to be that of the host. With `keep`, memory stays alive and its content before
    the trace is remembered, so that the operations can be done again."""

    def __init__(self, device: str, *, keep: bool) -> None:
        self.device, self.keep = device, keep
        self.all: dict[int, Block] = {}
        self._live: dict[int, Block] = {}
        # that is being captured
        self.graph: int | None = None

    def of(
        self,
        tensor: Tensor,
        stream: int,
        *,
        name: str,
        is_fresh: bool = False,
        on_host: bool = False,
    ) -> Block | None:
        """The block of a tensor; None if it has no bytes. A block that is seen for the first time
        gets the name, and the stream as the one that it was allocated on."""
        storage = tensor.untyped_storage()
        if not storage.nbytes():
            return None
        weak = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
        known = self._live.get(weak.cdata)
        if known is None:
            known = self._add(storage, weak, stream, name, is_fresh)
            known.on_host |= on_host
        return known

    def freed(self) -> list[Block]:
        """The blocks that nothing holds any more since the last call."""
        gone = [block for block in self._live.values() if block.weak.expired()]  # type: ignore[no-untyped-call]
        for block in gone:
            del self._live[block.weak.cdata]
        return gone

    def restore(self) -> None:
        """Everything as it was before the trace; what was allocated within holds poison."""
        for block in self.all.values():
            if block.storage is not None:
                now = _bytes_of(block.storage)
                if block.before is None:
                    now.fill_(_POISON)
                else:
                    now.copy_(block.before)

    def addresses(self) -> Addresses:
        return Addresses(sorted(self._live.values(), key=lambda block: block.start))

    def _add(
        self,
        storage: torch.UntypedStorage,
        weak: StorageWeakRef,
        stream: int,
        name: str,
        is_fresh: bool,
    ) -> Block:
        block = Block(
            len(self.all),
            name,
            stream,
            storage.data_ptr(),
            storage.nbytes(),
            storage.device.type != self.device,
            weak,
            self.graph if is_fresh else None,
            is_fresh,
        )
        if self.keep:
            block.storage = storage
            block.before = None if is_fresh else _bytes_of(storage).clone()
        self.all[block.number] = self._live[weak.cdata] = block
        return block


class Addresses:
    """Which block an address belongs to."""

    def __init__(self, blocks: list[Block]) -> None:
        self._blocks = blocks
        self._starts = [block.start for block in blocks]

    def parts(self, pointers: Any, size: int) -> Iterator[tuple[Block | None, Any]]:
        """The addresses (a numpy array) of accesses of `size` bytes by their block; None: memory
        that no operation has named."""
        while len(pointers):
            lowest = int(pointers.min())
            index = bisect_right(self._starts, lowest) - 1
            block = self._blocks[index] if index >= 0 else None
            if block is not None and lowest >= block.start + block.size:
                block = None
            if block is None:
                stop = self._starts[index + 1] if index + 1 < len(self._starts) else None
            else:
                stop = block.start + block.size
            if stop is None or int(pointers.max()) + size <= stop:
                yield block, pointers
                return
            inside = pointers < stop
            yield block, pointers[inside]
            pointers = pointers[~inside]


def spans_of(tensor: Tensor) -> Spans:
    """The bytes of its storage that a tensor consists of."""
    item, offset = tensor.element_size(), int(tensor.storage_offset())
    if not tensor.numel():
        return ()
    extent = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    if tensor.is_contiguous() or tensor.numel() > _MOST_SPANS * max(tensor.shape[-1:], default=1):
        return ((offset * item, (offset + extent) * item),)
    return strided(tensor.shape, tensor.stride(), offset, item)


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    view = torch.empty(0, dtype=torch.uint8, device=storage.device)
    return view.set_(storage, 0, (storage.nbytes(),), (1,))
