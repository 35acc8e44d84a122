"""Validation of the operands of a dense delta: ValueError that names the operand."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lorakernels.batch.metadata import BatchMetadata, tile_height
from lorakernels.batch.steps import check_option, fixed_height, prepared_rows
from lorakernels.dense.shape import DenseShape
from lorakernels.dense.sizes import plan_shrunk
from lorakernels.dense.weights import SlotWeights
from lorakernels.runtime.tuning import tuning_of


def check_step(x: Tensor, weights: SlotWeights, metadata: BatchMetadata) -> None:
    """What `x`, the input or the output of a step, and the mapping must be for any number of rows.
    Part of a traced graph, so it compares no size that changes from step to step."""
    if metadata.max_slots > weights.num_slots:
        # rows of a slot beyond them would read past the weights
        raise ValueError(
            f"metadata must have at most {weights.num_slots} slots like the weights "
            f"(got {metadata.max_slots})"
        )
    if x.dim() != 2:
        raise ValueError(f"x and out must have two dimensions (got shape {list(x.shape)})")


def check_rows(x: Tensor, tile_rows: Tensor) -> None:
    """`x` is the input or the output of the step that the mapping with this table is for, under the
    option that the table is laid out for."""
    check_option(tile_rows)
    num_rows = prepared_rows(tile_rows)
    if num_rows is not None and x.shape[0] != num_rows:
        raise ValueError(
            f"x and out must have {num_rows} rows, as the metadata was prepared for "
            f"(got {x.shape[0]})"
        )
    height = fixed_height(tile_rows)
    if height is not None and height != (needed := tile_height(x.shape[0], tuning_of(x.device))):
        raise ValueError(
            f"metadata must have tiles of {needed} rows for {x.shape[0]} rows (got height {height})"
        )


def check_devices(x: Tensor, tile_rows: Tensor, shrunk: Tensor | None) -> None:
    """The tables of the mapping and the workspace are on the device of x. A kernel would read those
    of another GPU without an order between the two, or fail for good."""
    for name, tensor in (("metadata", tile_rows), ("workspace", shrunk)):
        if tensor is not None and tensor.device != x.device:
            raise ValueError(f"{name} must be on {x.device} like x and out (got {tensor.device})")


def check_operands(x: Tensor, a: Tensor, b: Tensor, out: Tensor) -> None:
    check_layouts(x, a, b, out)
    check_apart(x, out)


def check_layouts(x: Tensor, a: Tensor, b: Tensor, out: Tensor) -> None:
    """All of `check_operands` that does not depend on where the operands are."""
    check_input(x, a)
    if out.dim() != 2:
        raise ValueError(f"out must have two dimensions (got shape {list(out.shape)})")
    if out.shape[0] != x.shape[0]:
        raise ValueError(f"out must have {x.shape[0]} rows like x (got {out.shape[0]})")
    check_output(out, b)


def check_apart(x: Tensor, out: Tensor) -> None:
    # operands of other dimensions are refused by their layout
    if x.dim() == out.dim() == 2 and x.shape[0] and overlap(x, out):
        raise ValueError("out must not overlap x in memory")


def check_input(x: Tensor, a: Tensor) -> None:
    if x.shape[1] != a.shape[3]:
        raise ValueError(f"x must have {a.shape[3]} columns (got {x.shape[1]})")
    check_like("x", x, a)


def check_output(out: Tensor, b: Tensor) -> None:
    if out.shape[1] != b.shape[1]:
        raise ValueError(f"out must have {b.shape[1]} columns (got {out.shape[1]})")
    check_like("out", out, b)
    if overlaps_itself(out):
        raise ValueError(
            "out must not overlap itself in memory, where rows would be written over each other "
            f"(got strides {list(out.stride())})"
        )


def check_whole(a: Tensor, b: Tensor) -> None:
    """A, also of experts, has all ranks of B, and not those of one rank of a group."""
    held, rank = a.shape[-2], b.shape[-1]
    if held != rank:
        raise ValueError(
            f"weights must hold all {rank} ranks of A, they are sharded by rank (got {held})"
        )


def check_like(name: str, tensor: Tensor, weight: Tensor) -> None:
    """Dtype and device of an operand are those of the weights."""
    if tensor.dtype != weight.dtype:
        raise ValueError(f"{name} must be {weight.dtype} like the weights (got {tensor.dtype})")
    if tensor.device != weight.device:
        raise ValueError(f"{name} must be on {weight.device} (got {tensor.device})")


def check_shrunk(shrunk: Tensor, shape: DenseShape, num_slots: int) -> None:
    wanted = plan_shrunk(shape, num_slots)
    if shrunk.shape != wanted or shrunk.dtype != torch.float32 or not shrunk.is_contiguous():
        raise ValueError(
            f"shrunk must be contiguous float32 {list(wanted)} "
            f"(got {shrunk.dtype} {list(shrunk.shape)})"
        )


def overlap(x: Tensor, out: Tensor) -> bool:
    """Whether out may write what x reads. Columns side by side in one buffer do not overlap, even
    if all rows of x are one row of it."""
    if x.untyped_storage().data_ptr() != out.untyped_storage().data_ptr():
        return False
    first, last = sorted((x, out), key=Tensor.storage_offset)
    gap = last.storage_offset() - first.storage_offset()
    if gap > sum((n - 1) * s for n, s in zip(first.shape, first.stride(), strict=True)):
        return False
    # a tensor of one row fits any distance between rows
    distances = {t.stride(0) for t in (x, out) if t.shape[0] > 1 and t.stride(0) > 0}
    if len(distances) != 1 or not all(t.stride(1) == 1 or t.shape[1] == 1 for t in (x, out)):
        return True
    row = distances.pop()
    return gap % row < first.shape[1] or gap % row + last.shape[1] > row


def overlaps_itself(out: Tensor) -> bool:
    """Whether two elements of a tensor are in one place."""
    (rows, columns), (down, right) = out.shape, out.stride()
    step = math.gcd(down, right)
    if step == 0:
        return out.numel() > 1
    # the next place of both a later row and an earlier column
    return right // step < rows and down // step < columns
