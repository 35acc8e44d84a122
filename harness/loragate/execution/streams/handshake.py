"""Two streams prove that they run at the same time: each waits, for a bounded time, until the other
one has arrived. Needs compiled kernels."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

# about a second of polling
_MOST_POLLS = 1 << 20


class Meeting:
    """The place where two streams meet any number of times, replays of a graph included."""

    def __init__(self, device: str) -> None:
        self._arrived = torch.zeros(2, dtype=torch.int32, device=device)
        # counted by the two streams: how often they met, and how often they waited in vain
        self._counts = torch.zeros(2, dtype=torch.int32, device=device)
        # a capture allows no kernel to be compiled or loaded
        for party in range(2):
            self._arrived[1 - party] = 1
            self.arrive(party)
            self._arrived.zero_()
        self._counts.zero_()

    def arrive(self, party: int) -> None:
        """Queue the wait of party 0 or 1 on the current stream."""
        meet_kernel[(1,)](self._arrived, self._counts, PARTY=party, MOST_POLLS=_MOST_POLLS)

    def counts(self) -> tuple[int, int]:
        """How often a party met the other one, and how often it waited in vain. Waits for the
        device."""
        met, missed = self._counts.tolist()
        return met, missed


@triton.jit  # type: ignore[untyped-decorator]
def meet_kernel(arrived_ptr, counts_ptr, PARTY: tl.constexpr, MOST_POLLS: tl.constexpr):  # type: ignore[no-untyped-def]
    number = tl.atomic_add(arrived_ptr + PARTY, 1) + 1
    polls = 0
    others = tl.atomic_add(arrived_ptr + 1 - PARTY, 0)
    while (others < number) & (polls < MOST_POLLS):
        others = tl.atomic_add(arrived_ptr + 1 - PARTY, 0)
        polls += 1
    tl.atomic_add(counts_ptr + tl.where(others < number, 1, 0), 1)
