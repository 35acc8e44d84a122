"""Work beside other work: one fork and join over streams, for any number of sides.

Order. The sides start when everything that was queued on the current stream before the fork is
done, and everything that is queued on it afterwards waits for all of them, also where a part
raises. Every fork has events of its own, so that two forks in flight never share one; a fork that
is captured becomes a part of the graph.

Memory. A side returns nothing: what it leaves behind it writes into tensors that were allocated
before the fork. They belong to the stream of the fork, which reuses their memory behind the join,
and the callables keep them alive until then; so no tensor needs `record_stream`, which a capture
would hold on to. What a side allocates for itself belongs to the stream of the side and must not
leave it.

Branches. Within an outermost fork each side is a branch with a number of its own, however deep it
is nested; branch 0 is the rest. The number decides which stream a side runs on and which part of a
workspace it may use, so that no two branches in flight share either of them; only where all streams
that torch has are in use, further branches share them, one after the other. Outermost forks of one
stream reuse the numbers: they run one after the other. Buffers of which there is only one are
claimed by the part of a fork that writes them, and refused to its other parts.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")

# the work of a side is short and is waited for: its blocks go first
_PRIORITY = -1
# torch hands out 32 streams of a priority in turn
_MOST_STREAMS = 32


def stream_module(device: torch.device) -> Any | None:
    """The module whose streams a device has, None for a device without. Its names `Stream`,
    `Event`, `device`, `stream`, `current_stream` and `is_current_stream_capturing` mean what those
    of torch.cuda do, and no others are used."""
    return torch.cuda if device.type == "cuda" else None


def fork_join(
    device: torch.device,
    main: Callable[[], T],
    *sides: Callable[[], None],
    parallel: bool = True,
) -> T:
    """The result of `main`, which runs beside all `sides`, each of them on a stream of its own.

    No part may write what another one reads or writes. The parts are called in one order, the
    sides first: without `parallel`, and on a device without streams, that is all that happens.
    """
    module = stream_module(device) if parallel and sides else None
    if module is None:
        for side in sides:
            side()
        return main()
    return _fork_join(module, device, main, sides)


def branch() -> int:
    """The number of the branch that the caller is a part of; 0 outside of any side."""
    here = _HERE.get()
    return 0 if here is None else here.number


def is_capturing(device: torch.device) -> bool:
    """Whether the work of the current stream of a device becomes a part of a CUDA graph."""
    module = stream_module(device)
    if module is None:
        return False
    # the question is about the current device; by its number, which torch takes as it is
    with module.device(device if device.index is None else device.index):
        return bool(module.is_current_stream_capturing())


def claim(buffer: Tensor, name: str) -> None:
    """The caller writes a buffer that no other part of the forks around it may write. ValueError
    where another part has done so."""
    here = _HERE.get()
    for claims, part in () if here is None else here.parts:
        # the buffer is kept with its claim, so that its id stays its own
        _, owner = claims.setdefault(id(buffer), (buffer, part))
        if owner != part:
            raise ValueError(f"{name} must not be shared by parts of a fork: give each its own")


# for one fork: by the id of a buffer, the buffer and the part that has claimed it
_Claims = dict[int, tuple[Tensor, int]]


@dataclass(slots=True)
class _Tree:
    """An outermost fork with all that is nested in it."""

    streams: list[Any]


@dataclass(frozen=True, slots=True)
class _Branch:
    tree: _Tree
    number: int
    # the forks around it, outermost first, and which part of each it belongs to
    parts: tuple[tuple[_Claims, int], ...] = ()

    def part(self, claims: _Claims, part: int, number: int) -> _Branch:
        return _Branch(self.tree, number, (*self.parts, (claims, part)))


_HERE: ContextVar[_Branch | None] = ContextVar("lorakernels_branch", default=None)

# side streams by the module and the device, the stream of the outermost fork, and the branch
_SIDES: dict[tuple[Any, torch.device, Any, int], Any] = {}


def _fork_join(
    module: Any, device: torch.device, main: Callable[[], T], sides: tuple[Callable[[], None], ...]
) -> T:
    current = module.current_stream(device)
    here = _HERE.get() or _Branch(_Tree([current]), 0)
    start = module.Event()
    start.record(current)
    ends: list[Any] = []
    claims: _Claims = {}
    try:
        for part, side in enumerate(sides, 1):
            number, stream = _open_branch(module, device, here.tree)
            with module.stream(stream):
                stream.wait_event(start)
                end = module.Event()
                try:
                    _call_in(here.part(claims, part, number), side)
                finally:
                    end.record(stream)
                    ends.append(end)
        return _call_in(here.part(claims, 0, here.number), main)
    finally:
        for end in ends:
            current.wait_event(end)


def _call_in(place: _Branch, work: Callable[[], T]) -> T:
    token = _HERE.set(place)
    try:
        return work()
    finally:
        _HERE.reset(token)


def _open_branch(module: Any, device: torch.device, tree: _Tree) -> tuple[int, Any]:
    """The next branch of an outermost fork: its number and its stream."""
    number = len(tree.streams)
    key = (module, device, tree.streams[0], number)
    stream = _SIDES.get(key)
    drawn = 0
    while stream is None or stream in tree.streams:
        if drawn == _MOST_STREAMS:
            # all of them are in use
            break
        # torch hands out a limited number of streams in turn, and would serialise two that are one
        stream = module.Stream(device=device, priority=_PRIORITY)
        drawn += 1
    _SIDES[key] = stream
    tree.streams.append(stream)
    return number, stream
