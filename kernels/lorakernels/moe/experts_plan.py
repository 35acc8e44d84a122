"""Launch parameters of the base product of a MoE layer, from shapes alone; measured on an H200."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GemmShape:
    num_pairs: int
    # pairs of a tile
    height: int
    width: int
    depth: int
    # bytes of one element of the output
    itemsize: int
    is_gated: bool


@dataclass(frozen=True, slots=True)
class GemmPlan:
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


def fold_ranks(rank: int) -> int:
    """Ranks that one step of the fold multiplies."""
    return min(64, max(16, 1 << (rank - 1).bit_length()))


def plan_gemm(shape: GemmShape) -> GemmPlan:
    if shape.itemsize == 4:
        return GemmPlan(32, 32, 4, 2)
    if shape.height <= 32:
        return GemmPlan(64 if shape.is_gated else 128, 128, 4, 3)
    if shape.height == 64:
        return GemmPlan(64 if shape.is_gated else 128, 64, 4, 3)
    return GemmPlan(128, 64, 8, 4) if shape.is_gated else GemmPlan(128, 64, 4, 3)
