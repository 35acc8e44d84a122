"""Whether the kernels of one dry launch wait for each other where they must.

Kernels that are launched dependently (programmatic dependent launch) overlap with those ahead of
them. What one of them uses ahead of its wait must not be what another one is still at; nor may the
work that follows find any of them unfinished. Nothing is known of the work ahead of the first
kernel, so it is taken to write all memory that the kernels use. Memory that a kernel finds through
a table of addresses is not judged.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from loragate.execution.streams.arguments import tensors_of
from loragate.execution.streams.memory import spans_of
from loragate.execution.trace.inventory import (
    Edge,
    EdgeKind,
    Inventory,
    Node,
    NodeKind,
    unordered,
)
from loragate.execution.trace.operations import Access
from loragate.execution.trace.ttir import pointer_use, waits_of


@dataclass(frozen=True, slots=True)
class _Launch:
    """tensors: the pointer arguments and their names, in the order of the kernel."""

    kernel: str
    tensors: Sequence[tuple[str, Tensor]]
    is_dependent: bool
    ttir: str

    def node(self) -> Node:
        use = pointer_use(self.ttir)
        early = {False: use.early_reads, True: use.early_writes}
        accesses = tuple(
            Access(_block(tensor), spans_of(tensor), is_write, name, number in early[is_write])
            for number, (name, tensor) in enumerate(self.tensors)
            for is_write, numbers in ((False, use.reads), (True, use.writes))
            if number in numbers
        )
        return Node(NodeKind.KERNEL, self.kernel, (), accesses, waits_of(self.ttir))


class KernelOrder:
    """The kernels of one dry launch, on one stream, in the order of their launches."""

    def __init__(self) -> None:
        # they hold their tensors, so that no two storages have one address
        self._launches: list[_Launch] = []

    def add(
        self, kernel: Any, args: tuple[Any, ...], options: Mapping[str, Any], ttir: str
    ) -> None:
        tensors = tensors_of(kernel.arg_names, args, options)
        is_dependent = bool(options.get("launch_pdl"))
        self._launches.append(_Launch(kernel.fn.__name__, tensors, is_dependent, ttir))

    def flaws(self) -> Iterator[str]:
        """What is used too early, one text for each pair of kernels and argument."""
        if not any(launch.is_dependent for launch in self._launches):
            return
        used = [tensor for launch in self._launches for tensor in launch.tensors]
        sizes = {_block(tensor): tensor.untyped_storage().nbytes() for _, tensor in used}
        everything = tuple(Access(block, ((0, size),), True) for block, size in sizes.items())
        ahead = Node(NodeKind.OTHER, "the work ahead", (), everything)
        behind = Node(NodeKind.OTHER, "the work behind", (), everything)
        nodes = (ahead, *(launch.node() for launch in self._launches), behind)
        names = {_block(tensor): name for name, tensor in reversed(used)}
        for found in unordered(Inventory(nodes, tuple(self._edges()), block_names=names)):
            yield found.message

    def _edges(self) -> Iterator[Edge]:
        for number, launch in enumerate(self._launches):
            kind = EdgeKind.PROGRAMMATIC if launch.is_dependent else EdgeKind.FULL
            yield Edge(number, number + 1, kind)
        yield Edge(len(self._launches), len(self._launches) + 1)


def _block(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
