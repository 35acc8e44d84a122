"""Exchanges between the tensor-parallel ranks of a layer: over torch.distributed, or between ranks
that are simulated in one process.

Operators get tensors and numbers alone, so a group is passed to them by its number, which all
layers of the group share: a traced graph does not depend on the layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from itertools import count
from typing import Protocol, TypeVar
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")


class Collective(Protocol):
    """What a layer needs of the group that it is cut over, seen from one rank of it."""

    @property
    def size(self) -> int:
        """Ranks of the group."""

    @property
    def rank(self) -> int:
        """This rank, 0 to size - 1."""

    def all_gather(self, part: Tensor, out: Tensor) -> None:
        """out [size, *part.shape] = the parts of all ranks, in the order of the ranks. Both are
        contiguous. The host waits for nothing."""

    def all_reduce(self, tensor: Tensor) -> None:
        """tensor = the sum over all ranks, in place; the same bits on each of them. Contiguous.
        The host waits for nothing."""


class GroupCollective:
    """The ranks of a process group of torch.distributed, NCCL for GPUs or gloo for the CPU.

    group: None stands for all processes. NCCL sets itself up in the first exchange, which must not
    be captured into a CUDA graph; later ones may.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group

    @property
    def size(self) -> int:
        return dist.get_world_size(self._group)

    @property
    def rank(self) -> int:
        return dist.get_rank(self._group)

    def all_gather(self, part: Tensor, out: Tensor) -> None:
        # out with the axis of ranks in front lies as the parts one behind the other
        dist.all_gather_into_tensor(out.view(-1), part.view(-1), group=self._group)

    def all_reduce(self, tensor: Tensor) -> None:
        dist.all_reduce(tensor, group=self._group)


class _Exchange(Enum):
    GATHER = auto()
    REDUCE = auto()


@dataclass(frozen=True, slots=True)
class _Part:
    """What a rank has brought to an exchange."""

    kind: _Exchange
    tensor: Tensor


class _NotAnsweredError(Exception):
    """A rank has brought its part to an exchange, and goes on when all others have done so."""


class SimulatedRanks:
    """The ranks of a group in one process, one after the other, for tests and trials.

    `run` calls each rank from its start again and again, up to one more exchange each time. So a
    call may write its result and buffers of its layer, and nothing that it reads.
    """

    def __init__(self, size: int) -> None:
        if size < 1:
            raise ValueError(f"size must be at least 1 (got {size})")
        self.size = size
        self._answers: list[list[_Part]] = []
        self._ranks = [_SimulatedRank(self, rank) for rank in range(size)]

    def rank(self, rank: int) -> Collective:
        """The group as this rank sees it."""
        return self._ranks[rank]

    def run(self, calls: Sequence[Callable[[], T]]) -> list[T]:
        """The results of all ranks, whose calls are given in their order. ValueError where not all
        of them come to the same exchanges."""
        if len(calls) != self.size:
            raise ValueError(f"calls must be one for each of {self.size} ranks (got {len(calls)})")
        try:
            while True:
                results = [*self._results(calls)]
                if len(results) == self.size:
                    return results
                self._answers.append(_agreed(self._ranks))
        finally:
            self._answers.clear()

    def answer(self, exchange: int) -> list[_Part] | None:
        """The parts of all ranks, if they have come to this exchange."""
        return self._answers[exchange] if exchange < len(self._answers) else None

    def _results(self, calls: Sequence[Callable[[], T]]) -> list[T]:
        results = []
        for rank, call in zip(self._ranks, calls, strict=True):
            rank.start()
            try:
                results.append(call())
            except _NotAnsweredError:
                continue
        return results


@dataclass(slots=True, eq=False, weakref_slot=True)
class _SimulatedRank:
    group: SimulatedRanks
    rank: int
    done: int = 0
    brought: list[_Part] = field(default_factory=list)

    @property
    def size(self) -> int:
        return self.group.size

    def start(self) -> None:
        self.done = 0
        self.brought.clear()

    def all_gather(self, part: Tensor, out: Tensor) -> None:
        torch.stack(self._exchanged(_Exchange.GATHER, part), out=out)

    def all_reduce(self, tensor: Tensor) -> None:
        torch.sum(torch.stack(self._exchanged(_Exchange.REDUCE, tensor)), 0, out=tensor)

    def _exchanged(self, kind: _Exchange, tensor: Tensor) -> list[Tensor]:
        parts = self.group.answer(self.done)
        if parts is None:
            # a copy: the buffer is the next rank's, too
            self.brought.append(_Part(kind, tensor.clone()))
            raise _NotAnsweredError
        self.done += 1
        return [part.tensor for part in parts]


def _agreed(ranks: Sequence[_SimulatedRank]) -> list[_Part]:
    parts = [part for rank in ranks for part in rank.brought]
    if len(parts) != len(ranks) or len({(p.kind, p.tensor.shape) for p in parts}) != 1:
        brought = [[(p.kind.name, list(p.tensor.shape)) for p in rank.brought] for rank in ranks]
        raise ValueError(f"all ranks must come to the same exchange (got {brought})")
    dtypes = [p.tensor.dtype for p in parts]
    if len(set(dtypes)) > 1:
        raise ValueError(f"all ranks must bring tensors of one dtype (got {dtypes})")
    return parts


_NUMBERS = count()
_COLLECTIVES: WeakValueDictionary[int, Collective] = WeakValueDictionary()


def number_of(collective: Collective) -> int:
    """The number by which an operator finds a group, for as long as a layer keeps the group.
    ValueError for one that weak references cannot be made to."""
    for number, known in _COLLECTIVES.items():
        if known is collective:
            return number
    number = next(_NUMBERS)
    try:
        _COLLECTIVES[number] = collective
    except TypeError as error:
        raise ValueError(
            "collective must allow weak references, which a class with __slots__ does that names "
            f"__weakref__ (got a {type(collective).__name__})"
        ) from error
    return number


def collective_of(number: int) -> Collective:
    """The group with this number."""
    return _COLLECTIVES[number]
