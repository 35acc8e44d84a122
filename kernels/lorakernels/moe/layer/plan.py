"""Launch parameters of the base product of a MoE layer, from shapes alone. The blocks were chosen
on an H200; they hold no threshold that depends on how large a device is."""

from __future__ import annotations

from dataclasses import dataclass

from lorakernels.common.sizes import power_of_2


@dataclass(frozen=True, slots=True)
class GemmPlan:
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


def group_ranks(height: int) -> int:
    """Ranks that one step of the folded expand multiplies, in a tile of `height` pairs."""
    # a tall tile needs its registers for its accumulators
    return 32 if height >= 64 else 64


def fold_ranks(rank: int, height: int) -> int:
    """Those of them that one slot has."""
    return min(group_ranks(height), max(16, power_of_2(rank)))


def plan_gemm(height: int, *, itemsize: int, is_gated: bool) -> GemmPlan:
    """`height`: pairs of a tile; `itemsize`: bytes of one element of the output."""
    if itemsize == 4:
        return GemmPlan(32, 32, 4, 2)
    if height <= 64:
        block_k = 128 if height <= 32 else 64
        return GemmPlan(64 if is_gated else 128, block_k, 4, 3)
    return GemmPlan(128, 64, 8, 4) if is_gated else GemmPlan(128, 64, 4, 3)
