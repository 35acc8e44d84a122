"""A device that is behind its host."""

from __future__ import annotations

import torch

# half a second at the clocks of current GPUs: longer than some steps take to launch
_CYCLES = 1_000_000_000


def keep_busy() -> torch.cuda.Event:
    """Queue a kernel that runs for about half a second, without waiting for it. The event has
    happened when it is done."""
    torch.cuda._sleep(_CYCLES)  # type: ignore[no-untyped-call]
    done = torch.cuda.Event()  # type: ignore[no-untyped-call]
    done.record()
    return done
