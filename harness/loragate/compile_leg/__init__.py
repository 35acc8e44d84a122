"""Compile every kernel for GPUs that need not be present, and judge the resources of each.

Invariant: what is compiled is what a real launch on that GPU would compile. The host code of a
subject runs as it is; only its tensors carry no data, and Triton's driver names another target.
"""

from __future__ import annotations

from loragate.compile_leg.baseline import BaselineError
from loragate.compile_leg.leg import ARCHS, BASELINE, expected_count, record, run

__all__ = ["ARCHS", "BASELINE", "BaselineError", "expected_count", "record", "run"]
