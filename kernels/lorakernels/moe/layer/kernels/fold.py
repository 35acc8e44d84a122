"""Parts of the Triton kernel of a MoE product that fold the LoRA expand into its last step: to the
sums of a tile is added h @ B.T of the slot of each of its pairs.

Slots of up to GROUP_R ranks are multiplied together, as one product in which each row has the ranks
of its own slot and zeros for the others; h is stored times its scale then. That is right where B is
finite: 0 * Inf would be NaN in the rows of other slots. Otherwise slots are multiplied one by one.

Names as in gemm.py: h [P, S*R] is the shrink output in the dtype of B.
"""

import triton
import triton.language as tl

from lorakernels.common.jit import dot

# slots that are looked for at a time, as bits of an int32 that are no sign
WINDOW = tl.constexpr(31)


@triton.jit
def _slots_here(slots, window):
    """The slots of a tile from `window` on as bits."""
    here = (slots >= window) & (slots < window + WINDOW)
    bits = 1 << tl.where(here, slots - window, 0)
    return tl.reduce_or(tl.where(here, bits, 0), axis=0)


@triton.jit
def _lowest(bits):
    """The number of the lowest bit of a positive number: the exponent of that bit as a float."""
    return ((bits & -bits).to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127


@triton.jit
def _left_and_right(matrix):
    """The two halves of a matrix's columns. A thread of a multiplication has columns of both, so
    that nothing is exchanged."""
    halves = tl.reshape(matrix, [matrix.shape[0], 2, matrix.shape[1] // 2])
    return tl.split(tl.permute(halves, (0, 2, 1)))


@triton.jit
def _load_b(b_ptr, ranks_of, live_r, columns, live_n, R: tl.constexpr):
    b_ptrs = b_ptr + ranks_of[:, None] + columns.to(tl.int64) * R
    return tl.load(b_ptrs, mask=live_r[:, None] & live_n, other=0.0)


@triton.jit
def _load_h(shrunk_ptr, pairs, ranks_of, mine, SR: tl.constexpr):
    cells = shrunk_ptr + pairs.to(tl.int64)[:, None] * SR + ranks_of[None, :]
    return tl.load(cells, mask=mine, other=0.0)


@triton.jit
def _terms(
    shrunk_ptr,
    b_ptr,
    ranks_ptr,
    pairs,
    mine,
    ranks_of,
    columns,
    live_n,
    SR: tl.constexpr,
    R: tl.constexpr,
    RANK_ALIGN: tl.constexpr,
    HALVES: tl.constexpr,
):
    """The operands for one slot and slice: the ranks of the slot's pairs, zero for other pairs, and
    B, twice or in two halves. Whole vectors are loaded: past the live rank h is 0."""
    live_r = ranks_of < tl.cdiv(tl.load(ranks_ptr), RANK_ALIGN) * RANK_ALIGN
    h = _load_h(shrunk_ptr, pairs, ranks_of, mine[:, None] & live_r[None, :], SR)
    if HALVES:
        left, right = _left_and_right(columns[None, :])
        live_left, live_right = _left_and_right(live_n[None, :])
        b = _load_b(b_ptr, ranks_of, live_r, left, live_left, R)
        b_right = _load_b(b_ptr, ranks_of, live_r, right, live_right, R)
    else:
        b = _load_b(b_ptr, ranks_of, live_r, columns[None, :], live_n[None, :], R)
        b_right = b
    return h, b, b_right


@triton.jit
def _select_sum(acc, mine, h, b, scale, IEEE: tl.constexpr):
    delta = dot(h, b, tl.zeros(acc.shape, dtype=tl.float32), IEEE)
    return tl.where(mine[:, None], acc + delta * scale, acc)


@triton.jit
def _add_to(acc, mine, h, b, b_right, scale, HALVES: tl.constexpr, IEEE: tl.constexpr):
    """acc + h @ b * scale in the rows that are `mine`, b in two halves or whole. Rows are selected
    and not multiplied by zero. A second accumulator as large as the first would not fit into
    registers; halves need half of one."""
    if HALVES:
        left, right = _left_and_right(acc)
        left = _select_sum(left, mine, h, b, scale, IEEE)
        right = _select_sum(right, mine, h, b_right, scale, IEEE)
        acc = tl.reshape(tl.permute(tl.join(left, right), (0, 2, 1)), acc.shape)
    else:
        acc = _select_sum(acc, mine, h, b, scale, IEEE)
    return acc


@triton.jit
def _fold_one_by_one(
    acc,
    up,
    shrunk_ptr,
    b_ptr,
    ranks_ptr,
    scales_ptr,
    pairs,
    slots,
    bits,
    window,
    columns,
    live_n,
    up_rows,
    stride_b_slot,
    S: tl.constexpr,
    R: tl.constexpr,
    BLOCK_R: tl.constexpr,
    RANK_ALIGN: tl.constexpr,
    GATED: tl.constexpr,
    IS_SCALED: tl.constexpr,
    IEEE: tl.constexpr,
):
    """acc + h @ B.T * scale, and the same for the up half, slot by slot."""
    HALVES: tl.constexpr = acc.shape[0] >= 64
    BLOCKS: tl.constexpr = (R + BLOCK_R - 1) // BLOCK_R
    offs_r = tl.arange(0, BLOCK_R)
    while bits != 0:
        slot = window + _lowest(bits)
        bits = bits & (bits - 1)
        mine = slots == slot
        scale = 1.0
        up_scale = 1.0
        if not IS_SCALED:
            scale = tl.load(scales_ptr + slot * S)
            if GATED:
                up_scale = tl.load(scales_ptr + slot * S + 1)
        b_slot = b_ptr + tl.cast(slot, tl.int64) * stride_b_slot
        for block in tl.range(0, BLOCKS, num_stages=1):
            ranks_of = block * BLOCK_R + offs_r
            # fmt: off
            h, b, more_b = _terms(shrunk_ptr, b_slot, ranks_ptr + slot * S, pairs, mine, ranks_of,
                                  columns, live_n, S * R, R, RANK_ALIGN, HALVES)
            if GATED:
                h_up, b_up, more_up = _terms(shrunk_ptr + R, b_slot + up_rows * R,
                                             ranks_ptr + slot * S + 1, pairs, mine, ranks_of,
                                             columns, live_n, S * R, R, RANK_ALIGN, HALVES)
            # fmt: on
                up = _add_to(up, mine, h_up, b_up, more_up, up_scale, HALVES, IEEE)
            acc = _add_to(acc, mine, h, b, more_b, scale, HALVES, IEEE)
    return acc, up


@triton.jit
def _load_ranks(ranks_ptr, window, num_slots, S: tl.constexpr):
    """The live ranks of the slots from `window` on, behind which there is a zero. They are on their
    way before it is known which of these slots a tile has."""
    offsets = tl.arange(0, 32)
    slots = window + offsets
    return tl.load(ranks_ptr + slots * S, mask=(slots < num_slots) & (offsets < WINDOW), other=0)


@triton.jit
def _live_ranks(ranks, ranks_of, RANK_ALIGN: tl.constexpr):
    live = ranks_of < tl.cdiv(ranks, RANK_ALIGN) * RANK_ALIGN
    return tl.max_constancy(live, RANK_ALIGN)


@triton.jit
def _spoils(b):
    """For each column 0, or NaN where one of its values is Inf or NaN."""
    return tl.sum(b.to(tl.float32) * 0.0, axis=0)


@triton.jit
def _fold_together(
    acc,
    up,
    spoiled,
    shrunk_ptr,
    b_ptr,
    ranks,
    up_ranks,
    pairs,
    slots,
    bits,
    window,
    columns,
    live_n,
    up_rows,
    stride_b_slot,
    S: tl.constexpr,
    R: tl.constexpr,
    BLOCK_R: tl.constexpr,
    GROUP_R: tl.constexpr,
    RANK_ALIGN: tl.constexpr,
    GATED: tl.constexpr,
    IEEE: tl.constexpr,
):
    """acc + h @ B.T, and the same for the up half, for as many slots at a time as GROUP_R ranks
    have space for; and `spoiled`, which becomes NaN in columns whose B is not finite. ranks and
    up_ranks are those of the slots from `window` on."""
    BLOCKS: tl.constexpr = (R + BLOCK_R - 1) // BLOCK_R
    offs_r = tl.arange(0, GROUP_R)
    while bits != 0:
        # the slot of each rank of the group, -2 for none: no pair has that
        slot_of = tl.full([GROUP_R], -2, dtype=tl.int32)
        for place in tl.static_range(GROUP_R // BLOCK_R):
            slot = tl.where(bits != 0, window + _lowest(bits), -2)
            slot_of = tl.where(offs_r // BLOCK_R == place, slot, slot_of)
            bits = bits & (bits - 1)
        # the compiler cannot see through the selection, and would access two bytes at a time
        slot_of = tl.max_constancy(slot_of, BLOCK_R)
        exists = slot_of >= 0
        known = tl.where(exists, slot_of, 0)
        place_of = tl.where(exists, slot_of - window, WINDOW)
        held = tl.gather(ranks, place_of, axis=0)
        if GATED:
            up_held = tl.gather(up_ranks, place_of, axis=0)
        own = slots[:, None] == slot_of[None, :]
        for block in tl.range(0, BLOCKS, num_stages=1):
            ranks_of = block * BLOCK_R + offs_r % BLOCK_R
            places = known.to(tl.int64) * stride_b_slot + ranks_of
            places = tl.max_contiguous(tl.multiple_of(places, RANK_ALIGN), RANK_ALIGN)
            live = _live_ranks(held, ranks_of, RANK_ALIGN)
            h = _load_h(shrunk_ptr, pairs, ranks_of, own & live[None, :], S * R)
            b = _load_b(b_ptr, places, live, columns[None, :], live_n[None, :], R)
            spoiled += _spoils(b)
            if GATED:
                live = _live_ranks(up_held, ranks_of, RANK_ALIGN)
                h_up = _load_h(shrunk_ptr + R, pairs, ranks_of, own & live[None, :], S * R)
                b_up = _load_b(
                    b_ptr + up_rows * R, places, live, columns[None, :], live_n[None, :], R
                )
                spoiled += _spoils(b_up)
                up = dot(h_up, b_up, up, IEEE)
            acc = dot(h, b, acc, IEEE)
    return acc, up, spoiled


@triton.jit
def fold_together(
    acc,
    up,
    shrunk_ptr,
    b_ptr,
    ranks_ptr,
    pairs,
    slots,
    columns,
    live_n,
    up_rows,
    stride_b_slot,
    num_slots,
    S: tl.constexpr,
    R: tl.constexpr,
    BLOCK_R: tl.constexpr,
    GROUP_R: tl.constexpr,
    RANK_ALIGN: tl.constexpr,
    GATED: tl.constexpr,
    IEEE: tl.constexpr,
):
    """The sums of a tile with the deltas of its pairs, the same for the up half, and whether that
    is right: B of all slots of the tile is finite."""
    spoiled = tl.zeros([acc.shape[1]], dtype=tl.float32)
    for window in range(0, num_slots, WINDOW):
        ranks = _load_ranks(ranks_ptr, window, num_slots, S)
        up_ranks = ranks
        if GATED:
            up_ranks = _load_ranks(ranks_ptr + 1, window, num_slots, S)
        bits = _slots_here(slots, window)
        # fmt: off
        acc, up, spoiled = _fold_together(acc, up, spoiled, shrunk_ptr, b_ptr, ranks, up_ranks,
                                          pairs, slots, bits, window, columns, live_n, up_rows,
                                          stride_b_slot, S, R, BLOCK_R, GROUP_R, RANK_ALIGN, GATED,
                                          IEEE)
        # fmt: on
    return acc, up, tl.sum(spoiled, axis=0) == 0.0


@triton.jit
def fold_one_by_one(
    acc,
    up,
    shrunk_ptr,
    b_ptr,
    ranks_ptr,
    scales_ptr,
    pairs,
    slots,
    columns,
    live_n,
    up_rows,
    stride_b_slot,
    num_slots,
    S: tl.constexpr,
    R: tl.constexpr,
    BLOCK_R: tl.constexpr,
    RANK_ALIGN: tl.constexpr,
    GATED: tl.constexpr,
    IS_SCALED: tl.constexpr,
    IEEE: tl.constexpr,
):
    """The same for any B, and for h that still has to be scaled unless it IS_SCALED."""
    for window in range(0, num_slots, WINDOW):
        bits = _slots_here(slots, window)
        # fmt: off
        acc, up = _fold_one_by_one(acc, up, shrunk_ptr, b_ptr, ranks_ptr, scales_ptr, pairs, slots,
                                   bits, window, columns, live_n, up_rows, stride_b_slot, S, R,
                                   BLOCK_R, RANK_ALIGN, GATED, IS_SCALED, IEEE)
        # fmt: on
    return acc, up
