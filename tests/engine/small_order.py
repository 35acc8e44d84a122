"""What an engine of a test is started with."""

from __future__ import annotations

from pathlib import Path

from loragate.engine.order import EngineOrder
from loragate.matrix.case import Case, Dtype, Site

ORDER = EngineOrder(
    case=Case(site=Site.ENGINE, rank=8, slots=1, dtype=Dtype.FP32),
    model=Path("model"),
    drafts=None,
    device="cpu",
    max_length=12,
    max_requests=2,
    num_adapters=1,
)
