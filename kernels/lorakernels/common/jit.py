"""Parts of Triton kernels that several of them share."""

import triton
import triton.language as tl


@triton.jit
def dot(lhs, rhs, acc, IEEE: tl.constexpr):
    # tf32 would cost an fp32 adapter 13 of its 23 mantissa bits
    if IEEE:
        return tl.dot(lhs, rhs, acc, input_precision="ieee")
    return tl.dot(lhs, rhs, acc)


@triton.jit
def load_shrunk(ptrs, mask, stride_split, SPLITS: tl.constexpr):
    """The split-K partials of the shrink, added up in their order."""
    h = tl.load(ptrs, mask=mask, other=0.0)
    for split in tl.static_range(1, SPLITS):
        h += tl.load(ptrs + tl.cast(stride_split, tl.int64) * split, mask=mask, other=0.0)
    return h


@triton.jit
def load_output(ptrs, mask, STORE: tl.constexpr):
    """What a product is added to: zeros where it is stored instead."""
    if STORE:
        return tl.zeros(ptrs.shape, ptrs.dtype.element_ty)
    return tl.load(ptrs, mask=mask, other=0.0)


@triton.jit
def locate_slice(group, WIDTHS: tl.constexpr, COLUMNS: tl.constexpr, ALIGN: tl.constexpr):
    """The slice that a group of COLUMNS columns belongs to, its first column there, the column
    where the slice starts in the output, and its width. Groups never straddle slices."""
    slice_id = group * 0
    column = group * 0
    start = group * 0
    width = group * 0
    first_group = 0
    first_column = 0
    for s in tl.static_range(len(WIDTHS)):
        here = group >= first_group
        slice_id = tl.where(here, s, slice_id)
        column = tl.where(here, (group - first_group) * COLUMNS, column)
        start = tl.where(here, first_column, start)
        width = tl.where(here, WIDTHS[s], width)
        first_group += (WIDTHS[s] + COLUMNS - 1) // COLUMNS
        first_column += WIDTHS[s]
    # the compiler cannot see through the selection, and would access two bytes at a time
    column = tl.multiple_of(column, COLUMNS & -COLUMNS)
    return slice_id, column, tl.multiple_of(start, ALIGN), tl.multiple_of(width, ALIGN)


@triton.jit
def start_of_sum(previous, LATE: tl.constexpr):
    """What the product with B is added to. What B is multiplied by is rounded to its dtype: in fp16
    that number times the scale may not fit where the result does, so the scale comes LATE, after
    the product; other dtypes have the range, and an early scale takes fewer registers."""
    return tl.zeros(previous.shape, tl.float32) if LATE else previous.to(tl.float32)


@triton.jit
def end_of_sum(acc, previous, scale, LATE: tl.constexpr):
    """The output in fp32, from a sum that began with `start_of_sum`."""
    return previous.to(tl.float32) + acc * scale if LATE else acc
