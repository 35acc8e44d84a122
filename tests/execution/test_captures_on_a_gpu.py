"""Captures on a real device."""

from __future__ import annotations

import pytest
import torch

from loragate.execution.graph import capture


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU")
def test_no_capture_runs_on_the_side_stream_of_a_subject() -> None:
    side, x = torch.cuda.Stream(), torch.zeros(1, device="cuda")  # type: ignore[no-untyped-call]
    streams: set[int] = set()

    def call() -> None:
        x.add_(1)
        streams.add(torch.cuda.current_stream().cuda_stream)

    # torch hands out 32 streams in turn
    for _ in range(40):
        capture(call, warm_ups=1)
    assert len(streams) == 1
    assert side.cuda_stream not in streams
