"""Delays on real streams: a kernel that spins for about a millisecond, at one place of a step.

Places are wherever the order of streams is decided: each record and each wait of an event, and each
time that another stream becomes the current one. The caller adds those where an input is written.
Warm-ups before a capture have none: they are most of a case of graphs, and what they compute is not
kept.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch

from loragate.execution.graph import is_warming_up

# about a millisecond
_CYCLES = 2_000_000


class Places:
    """Counts the places that a run passes, and spins at the one that is chosen."""

    def __init__(self, chosen: int | None) -> None:
        self.passed = 0
        self._chosen = chosen
        self._is_spinning = False

    def passes(self, stream: Any = None) -> None:
        """A place of the stream, or of the current one."""
        if self._is_spinning or is_warming_up():
            return
        if self.passed == self._chosen:
            self._is_spinning = True
            with torch.cuda.stream(stream or torch.cuda.current_stream()):
                torch.cuda._sleep(_CYCLES)  # type: ignore[no-untyped-call]
            self._is_spinning = False
        self.passed += 1


@contextmanager
def delayed(chosen: int | None = None) -> Iterator[Places]:
    """Within, work behind place number `chosen` is late; None: nothing is."""
    places = Places(chosen)
    event = torch.cuda.Event
    record, wait, set_stream = event.record, event.wait, torch.cuda.set_stream

    def recording(self: Any, stream: Any = None) -> None:
        # what is recorded comes later
        places.passes(stream)
        record(self, stream)

    def waiting(self: Any, stream: Any = None) -> None:
        wait(self, stream)
        places.passes(stream)

    def switching(stream: Any) -> None:
        set_stream(stream)
        places.passes(stream)

    with (
        patch.object(event, "record", recording),
        patch.object(event, "wait", waiting),
        patch.object(torch.cuda, "set_stream", switching),
    ):
        yield places


def chosen_places(count: int, *, limit: int, seed: int) -> list[int]:
    """All places if they are at most `limit`, otherwise that many, drawn from the seed."""
    if count <= limit:
        return list(range(count))
    return sorted(random.Random(seed).sample(range(count), limit))
