"""Branches of the delta of experts, of their layers, and of the alignment of pairs."""

from __future__ import annotations

from collections.abc import Iterator

from loragate.matrix.case import Case
from loragate.subjects.lorakernels.branches.text import several
from lorakernels.moe.delta import plan as moe
from lorakernels.moe.delta.plan import MoEPath, MoEShape
from lorakernels.moe.layer.plan import fold_ranks, plan_gemm
from lorakernels.moe.tiles import Alignment, base_tile_height, block_of_pairs, plan_alignment
from lorakernels.runtime.tuning import DEFAULT, Tuning

# pairs whose spans a program of the counting launches adds up in one step
_ONE_SUM = 256 * DEFAULT.align.span
# columns of a block of the sum over choices, up to which hidden size and beyond
SUM_BLOCKS = (256, 1024)


def alignment_branches(shape: MoEShape, slots: int, *, with_base: bool) -> Iterator[str]:
    way = plan_alignment(shape.num_pairs, shape.num_experts, slots, with_base)
    if way is Alignment.SORTED:
        yield "alignment: more buckets than a program counts"
        return
    if way is Alignment.COUNTED:
        yield "alignment: several launches"
        yield several("alignment: sums of spans", 1 + (shape.num_pairs > _ONE_SUM))
        return
    if way is Alignment.SORTED_AT_ONCE:
        yield "alignment: one program sorts all pairs"
        size = "the smallest" if block_of_pairs(shape.num_pairs) == block_of_pairs(1) else "another"
        yield f"alignment: block of the program that sorts: {size}"
        return
    yield "alignment: pairs compared with each other"


def delta_branches(shape: MoEShape, wanted: MoEPath | None, *, slots: int) -> Iterator[str]:
    path = moe.plan_path(shape, wanted)
    name = path.name.lower().replace("_", " ")
    if wanted is None:
        yield f"delta: {name} chosen"
    elif wanted is not path:
        yield "delta: a rank that the path cannot take"
    if path is MoEPath.SMALL_BATCH:
        yield from _small_batch(shape)
        return
    yield f"delta, {name}: tiles of {shape.height} pairs"
    # at least one tile for each adapter of the batch
    if min(slots - 1, shape.num_pairs) > moe.tile_programs(shape, capacity=shape.num_pairs + slots):
        yield f"delta, {name}: more tiles than programs"
    if path is MoEPath.ONE_SHOT:
        yield from _one_shot(shape)
    else:
        yield from _shrink(shape, "delta shrink")
        yield f"delta shrink: K is {'split' if moe.plan_shrink(shape).splits > 1 else 'whole'}"
        yield from _expand(shape)


def _shrink(shape: MoEShape, name: str, splits: int | None = None) -> Iterator[str]:
    plan, total = moe.plan_shrink(shape), shape.ranks_of_all_slices
    kind = "fp32" if shape.itemsize == 4 else "16 bits"
    steps = -(-shape.in_features // plan.block_k)
    yield f"{name}, {kind}: {plan.block_n} ranks x {plan.block_k} features"
    yield several(f"{name}: steps of a program", -(-steps // (splits or plan.splits)))
    yield several(f"{name}: blocks of ranks", -(-total // plan.block_n))
    if plan.block_n > shape.rank and total > shape.rank:
        yield f"{name}: a block of ranks of several slices"


def _expand(shape: MoEShape) -> Iterator[str]:
    plan = moe.plan_expand(shape)
    kind = "fp32" if shape.itemsize == 4 else "16 bits"
    yield f"delta expand, {kind}: blocks of {plan.block_n} columns"
    yield f"delta expand: blocks of {plan.block_r} ranks"
    yield several("delta expand: blocks of ranks", -(-shape.rank // plan.block_r))
    blocks = -(-max(shape.slice_widths) // plan.block_n)
    yield several("delta expand: blocks of columns", blocks)
    yield several("delta expand: blocks of columns of a program", plan.group)


def _one_shot(shape: MoEShape) -> Iterator[str]:
    plan = moe.plan_one_shot(shape)
    kind = "fp32" if shape.itemsize == 4 else "16 bits"
    yield f"one shot, {kind}: blocks of {plan.block_n} columns"
    yield f"one shot: blocks of {plan.block_r} ranks"
    yield f"one shot: {'both slices' if plan.paired else 'a slice'} in one program"
    yield several("one shot: steps", -(-shape.in_features // plan.block_k))
    yield several("one shot: programs of a slice", plan.parts)
    even = all(width % plan.block_n == 0 for width in shape.slice_widths)
    yield f"one shot: the last block of columns is {'full' if even else 'masked'}"
    blocks = -(-max(shape.slice_widths) // plan.block_n)
    yield several("one shot: blocks of columns of a program", -(-blocks // plan.parts))


def _small_batch(shape: MoEShape) -> Iterator[str]:
    plan = moe.plan_small_batch(shape)
    yield f"small batch: blocks of {plan.block_n} columns"
    yield several("small batch: steps", -(-shape.in_features // plan.block_k))
    blocks = -(-max(shape.slice_widths) // plan.block_n)
    yield several("small batch: blocks of columns", blocks)


def layer_branches(case: Case, size: int, tuning: Tuning) -> Iterator[str]:
    pairs, width = case.tokens * case.top_k, -(-case.slices[0] // case.tp)
    experts = case.experts // case.ep
    for depth, widths, is_gated in (
        (case.in_features, (width,) * len(case.slices), len(case.slices) == 2),
        (width, (case.in_features,), False),
    ):
        shape = MoEShape(pairs, experts, depth, widths, case.rank, size, tuning)
        yield from alignment_branches(shape, case.slots, with_base=True)
        yield from product_branches(shape, is_gated=is_gated)
    blocks = -(-case.in_features // SUM_BLOCKS[case.in_features >= SUM_BLOCKS[1]])
    yield f"layer sum: blocks of {SUM_BLOCKS[case.in_features >= SUM_BLOCKS[1]]} columns"
    yield several("layer sum: blocks of columns", blocks)


def product_branches(shape: MoEShape, *, is_gated: bool) -> Iterator[str]:
    yield f"layer shrink: tiles of {shape.height} pairs"
    yield from _shrink(shape, "layer shrink", splits=1)
    height = base_tile_height(shape.num_pairs, shape.num_experts, shape.tuning)
    plan = plan_gemm(height, itemsize=shape.itemsize, is_gated=is_gated)
    name = f"layer product, {'fp32' if shape.itemsize == 4 else '16 bits'}"
    gate = "gate and up" if is_gated else "one matrix"
    yield f"{name}, {gate}: {height} pairs x {plan.block_n} columns x {plan.block_k} features"
    steps, blocks = -(-shape.in_features // plan.block_k), -(-shape.slice_widths[0] // plan.block_n)
    yield several(f"{name}: steps", steps)
    yield f"{name}: the last step is {'masked' if shape.in_features % plan.block_k else 'full'}"
    yield several(f"{name}: blocks of columns", blocks)
    yield (
        f"{name}: the last block is {'masked' if shape.slice_widths[0] % plan.block_n else 'full'}"
    )
    ranks = fold_ranks(shape.rank, height)
    yield several("layer product: steps over ranks", -(-shape.rank // ranks))
