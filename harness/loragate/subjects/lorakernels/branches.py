"""Which branches of their plans a case takes in lorakernels: what the matrix covers of them.

A branch is a line of text, such as "dense shrink: K is split". All of it follows from the plan
functions, for the first batch of a case. What exists is found by asking them for a grid of sizes
on both sides of every threshold: a new branch of a plan is a new row of the table, without a case.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import chain, product

from loragate.inputs.mapping import num_padded
from loragate.matrix.case import Case, Dtype, Parallel, Path, Plans, Sharding, Site, Streams
from loragate.subjects.lorakernels import linear
from loragate.subjects.lorakernels.gdn import FORMS
from lorakernels.batch.metadata import tile_height
from lorakernels.dense import plan as dense
from lorakernels.dense.expand_plan import plan_expand
from lorakernels.dense.forms import LinearForm
from lorakernels.dense.shape import DenseShape
from lorakernels.gdn.forms import GDNForm, plan_gdn
from lorakernels.moe.delta import plan as moe
from lorakernels.moe.delta.plan import MoEPath, MoEShape
from lorakernels.moe.layer.plan import fold_ranks, plan_gemm
from lorakernels.moe.tiles import Alignment, base_tile_height, block_of_pairs, plan_alignment
from lorakernels.runtime.tuning import DEFAULT, Tuning, with_one_plan

# those that a plan takes
_LINEAR_FORMS = (LinearForm.SINGLE, *linear.FORMS.values())
# pairs whose spans a program of the counting launches adds up in one step
_ONE_SUM = 256 * DEFAULT.align.span
# columns of a block of the sum over choices, up to which hidden size and beyond
_SUM_BLOCKS = (256, 1024)


def branches(case: Case) -> frozenset[str]:
    """The branches that the first batch of a case takes; none for a batch without rows."""
    if not case.tokens:
        return frozenset()
    if case.sharding is Sharding.RANK:
        # its two plans are of two ranks; each is that of some other case
        return frozenset()
    size = 4 if case.dtype is Dtype.FP32 else 2
    if case.site is Site.MOE_LAYER:
        return frozenset(_layer(case, size))
    if case.site is Site.MOE_DELTA:
        pairs = case.tokens * case.top_k
        sizes = (pairs, case.experts, case.in_features, case.slices, case.rank, size)
        of_delta = MoEShape(*sizes, _tuning(case))
        wanted = None if case.path is Path.PLAN else MoEPath[case.path.name]
        aligned = _alignment(of_delta, case.slots, with_base=False)
        return frozenset([*_delta(of_delta, wanted, slots=case.slots), *aligned])
    if case.site is Site.GDN_IN_PROJ:
        return frozenset(_delta_net(case, size))
    if case.site is Site.EMBEDDING:
        shape = DenseShape(case.tokens, 1, case.slices, case.rank, size)
        return frozenset(_looked_up(shape, slots=case.slots))
    by_columns = case.tp if case.parallel is Parallel.COLUMN else 1
    by_rows = case.tp if case.parallel is Parallel.ROW else 1
    widths = tuple(-(-width // by_columns) for width in case.slices)
    depth = -(-case.in_features // by_rows)
    shape = DenseShape(case.tokens, depth, widths, case.rank, size, _tuning(case))
    taken = _dense(shape, live=case.tokens - num_padded(case), slots=case.slots)
    return frozenset([*taken, *_linear(case, shape)])


def _tuning(case: Case) -> Tuning:
    return with_one_plan(DEFAULT) if case.plans is Plans.ONE else DEFAULT


@cache
def all_branches(site: Site) -> tuple[str, ...]:
    """Every branch that some case of a site can take, in alphabetical order."""
    if site is Site.MOE_LAYER:
        found = _grid_of_layers()
    elif site is Site.MOE_DELTA:
        found = _grid_of_deltas()
    elif site is Site.GDN_IN_PROJ:
        found = iter([_form(GDNForm.MERGED, is_chosen=True), *map(_form, GDNForm)])
    elif site is Site.EMBEDDING:
        found = _grid_of_look_ups()
    else:
        found = chain(_grid_of_dense(), _grid_of_linears())
    return tuple(sorted(set(found)))


def _several(what: str, count: int) -> str:
    return f"{what}: {'one' if count == 1 else 'several'}"


def _dense(shape: DenseShape, *, live: int, slots: int) -> Iterator[str]:
    yield f"dense tile: {shape.height} rows"
    # what the preparation reads at a time, of a batch of that many rows
    block = 1024 if shape.num_rows <= 1024 else 4096
    yield _several("dense tile: blocks of rows to sort", -(-shape.num_rows // block))
    if tile_height(live, shape.tuning) != shape.height:
        yield "dense tile: live rows alone would have lower tiles"
    if min(slots - 1, live) > dense.tile_programs(shape, capacity=shape.num_rows + slots):
        yield "dense tile: more tiles than programs"
    shrink, expand = dense.plan_shrink(shape), plan_expand(shape)
    steps = -(-shape.in_features // shrink.block_k)
    total = shape.ranks_of_all_slices
    kind = "fp32" if shape.itemsize == 4 else "16 bits"
    yield f"dense shrink, {kind}: {shrink.block_n} ranks x {shrink.block_k} features"
    yield f"dense shrink: K is {'split' if shrink.splits > 1 else 'whole'}"
    yield _several("dense shrink: steps of a program", -(-steps // shrink.splits))
    yield _several("dense shrink: blocks of ranks", -(-total // shrink.block_n))
    if shrink.block_n > shape.rank and total > shape.rank:
        yield "dense shrink: a block of ranks of several slices"
    yield f"dense shrink: reads {'all' if shrink.reads_all_ranks else 'live'} ranks"
    yield f"dense shrink: the expand starts {'early' if shrink.trigger_early else 'late'}"
    yield f"dense expand, {kind}: {expand.block_m} rows x {expand.block_n} columns"
    yield f"dense expand: blocks of {expand.block_r} ranks"
    yield _several("dense expand: blocks of ranks", -(-shape.rank // expand.block_r))
    blocks = -(-max(shape.slice_widths) // expand.block_n)
    yield _several("dense expand: blocks of columns", blocks)
    of_rows = f"dense expand of {expand.block_m} rows"
    yield _several(f"{of_rows}: blocks of columns of a program", min(expand.group, blocks))
    yield _several("dense expand: parts of a tile", shape.height // expand.block_m)


def _linear(case: Case, shape: DenseShape) -> Iterator[str]:
    if case.site is Site.LORA_LINEAR:
        is_dual = case.streams is Streams.DUAL
        yield _linear_form(linear.FORMS[case.beside] if is_dual else LinearForm.SINGLE)
        if is_dual:
            yield _hidden_shrink(shape)


def _hidden_shrink(shape: DenseShape) -> str:
    """It has a plan of its own."""
    is_split = dense.plan_shrink(replace(shape, beside=True)).splits > 1
    split = "split" if is_split else "whole"
    return f"shrink beside a product: tiles of {shape.height} rows, K is {split}"


def _linear_form(form: LinearForm) -> str:
    return f"linear layer: {form.name.lower()}"


def _delta_net(case: Case, size: int) -> Iterator[str]:
    """What is not that of any linear layer."""
    form = FORMS[case.products, case.streams]
    if form is not None:
        yield _form(form)
        return
    shape = DenseShape(case.tokens, case.in_features, case.slices, case.rank, size)
    yield _form(plan_gdn(shape, dual_stream=False), is_chosen=True)


def _form(form: GDNForm, *, is_chosen: bool = False) -> str:
    return f"input of a delta net: {form.name.lower()}{' chosen' if is_chosen else ''}"


def _alignment(shape: MoEShape, slots: int, *, with_base: bool) -> Iterator[str]:
    way = plan_alignment(shape.num_pairs, shape.num_experts, slots, with_base)
    if way is Alignment.SORTED:
        yield "alignment: more buckets than a program counts"
        return
    if way is Alignment.COUNTED:
        yield "alignment: several launches"
        yield _several("alignment: sums of spans", 1 + (shape.num_pairs > _ONE_SUM))
        return
    if way is Alignment.SORTED_AT_ONCE:
        yield "alignment: one program sorts all pairs"
        size = "the smallest" if block_of_pairs(shape.num_pairs) == block_of_pairs(1) else "another"
        yield f"alignment: block of the program that sorts: {size}"
        return
    yield "alignment: pairs compared with each other"


def _looked_up(shape: DenseShape, *, slots: int) -> Iterator[str]:
    """Tiles and the expand are those of the dense delta."""
    yield _several("look-up: blocks of ranks", -(-shape.rank // dense.looked_up_ranks(shape)))
    programs = dense.tile_programs(shape, capacity=shape.num_rows + slots)
    most = "more" if min(slots - 1, shape.num_rows) > programs else "no more"
    yield f"look-up: {most} tiles than programs"


def _delta(shape: MoEShape, wanted: MoEPath | None, *, slots: int) -> Iterator[str]:
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
    yield _several(f"{name}: steps of a program", -(-steps // (splits or plan.splits)))
    yield _several(f"{name}: blocks of ranks", -(-total // plan.block_n))
    if plan.block_n > shape.rank and total > shape.rank:
        yield f"{name}: a block of ranks of several slices"


def _expand(shape: MoEShape) -> Iterator[str]:
    plan = moe.plan_expand(shape)
    kind = "fp32" if shape.itemsize == 4 else "16 bits"
    yield f"delta expand, {kind}: blocks of {plan.block_n} columns"
    yield f"delta expand: blocks of {plan.block_r} ranks"
    yield _several("delta expand: blocks of ranks", -(-shape.rank // plan.block_r))
    blocks = -(-max(shape.slice_widths) // plan.block_n)
    yield _several("delta expand: blocks of columns", blocks)
    yield _several("delta expand: blocks of columns of a program", plan.group)


def _one_shot(shape: MoEShape) -> Iterator[str]:
    plan = moe.plan_one_shot(shape)
    kind = "fp32" if shape.itemsize == 4 else "16 bits"
    yield f"one shot, {kind}: blocks of {plan.block_n} columns"
    yield f"one shot: blocks of {plan.block_r} ranks"
    yield f"one shot: {'both slices' if plan.paired else 'a slice'} in one program"
    yield _several("one shot: steps", -(-shape.in_features // plan.block_k))
    yield _several("one shot: programs of a slice", plan.parts)
    even = all(width % plan.block_n == 0 for width in shape.slice_widths)
    yield f"one shot: the last block of columns is {'full' if even else 'masked'}"
    blocks = -(-max(shape.slice_widths) // plan.block_n)
    yield _several("one shot: blocks of columns of a program", -(-blocks // plan.parts))


def _small_batch(shape: MoEShape) -> Iterator[str]:
    plan = moe.plan_small_batch(shape)
    yield f"small batch: blocks of {plan.block_n} columns"
    yield _several("small batch: steps", -(-shape.in_features // plan.block_k))
    blocks = -(-max(shape.slice_widths) // plan.block_n)
    yield _several("small batch: blocks of columns", blocks)


def _layer(case: Case, size: int) -> Iterator[str]:
    pairs, width = case.tokens * case.top_k, -(-case.slices[0] // case.tp)
    experts = case.experts // case.ep
    for depth, widths, is_gated in (
        (case.in_features, (width,) * len(case.slices), len(case.slices) == 2),
        (width, (case.in_features,), False),
    ):
        shape = MoEShape(pairs, experts, depth, widths, case.rank, size, _tuning(case))
        yield from _alignment(shape, case.slots, with_base=True)
        yield from _product(shape, is_gated=is_gated)
    blocks = -(-case.in_features // _SUM_BLOCKS[case.in_features >= _SUM_BLOCKS[1]])
    yield f"layer sum: blocks of {_SUM_BLOCKS[case.in_features >= _SUM_BLOCKS[1]]} columns"
    yield _several("layer sum: blocks of columns", blocks)


def _product(shape: MoEShape, *, is_gated: bool) -> Iterator[str]:
    yield f"layer shrink: tiles of {shape.height} pairs"
    yield from _shrink(shape, "layer shrink", splits=1)
    height = base_tile_height(shape.num_pairs, shape.num_experts, shape.tuning)
    plan = plan_gemm(height, itemsize=shape.itemsize, is_gated=is_gated)
    name = f"layer product, {'fp32' if shape.itemsize == 4 else '16 bits'}"
    gate = "gate and up" if is_gated else "one matrix"
    yield f"{name}, {gate}: {height} pairs x {plan.block_n} columns x {plan.block_k} features"
    steps, blocks = -(-shape.in_features // plan.block_k), -(-shape.slice_widths[0] // plan.block_n)
    yield _several(f"{name}: steps", steps)
    yield f"{name}: the last step is {'masked' if shape.in_features % plan.block_k else 'full'}"
    yield _several(f"{name}: blocks of columns", blocks)
    yield (
        f"{name}: the last block is {'masked' if shape.slice_widths[0] % plan.block_n else 'full'}"
    )
    ranks = fold_ranks(shape.rank, height)
    yield _several("layer product: steps over ranks", -(-shape.rank // ranks))


_RANKS = (8, 17, 33, 65, 129, 512)
_DEPTHS = (16, 200, 4096, 8192)
_WIDTHS = ((8,), (24,), (64,), (128, 128), (300, 200), (4608, 4608), (9000,))


def _grid_of_look_ups() -> Iterator[str]:
    for rows, rank, slots in product((1, 8192), _RANKS, (2, 64)):
        yield from _looked_up(DenseShape(rows, 1, (8,), rank, 2), slots=slots)
    yield from _looked_up(DenseShape(64, 1, (8,), 8, 2), slots=64)


def _grid_of_dense() -> Iterator[str]:
    rows = (1, 50, 100, 150, 1024, 1100, 2050, 8192)
    sizes = product(rows, _DEPTHS, (*_WIDTHS, (6500, 6500)), _RANKS, (2, 4))
    for count, depth, widths, rank, size in sizes:
        for slots, live in ((2, count), (64, count - (count + 2) // 4)):
            yield from _dense(DenseShape(count, depth, widths, rank, size), live=live, slots=slots)


def _grid_of_linears() -> Iterator[str]:
    """Besides the dense delta."""
    yield from map(_linear_form, _LINEAR_FORMS)
    # no plan hides a shrink of more rows
    for rows, depth in product((1, 100, 150), (16, 8192)):
        yield _hidden_shrink(DenseShape(rows, depth, (64,), 8, 2))


def _moe_shapes(pairs: tuple[int, ...]) -> Iterator[MoEShape]:
    sizes = product(pairs, (1, 16, 256), _DEPTHS[:3], _WIDTHS, _RANKS, (2, 4))
    for count, experts, depth, widths, rank, size in sizes:
        yield MoEShape(count, experts, depth, widths, rank, size)


def _grid_of_deltas() -> Iterator[str]:
    for shape in _moe_shapes((2, 100, 600, 1100, 2**16)):
        slots = 4 if shape.num_experts == 16 else 64
        yield from _alignment(shape, slots, with_base=False)
        for wanted in (None, *MoEPath):
            yield from _delta(shape, wanted, slots=slots)


def _grid_of_layers() -> Iterator[str]:
    for shape in _moe_shapes((2, 12, 30, 200, 600, 1100, 2**16)):
        if len(set(shape.slice_widths)) == 1:
            yield from _alignment(shape, 4 if shape.num_experts < 256 else 64, with_base=True)
            yield from _product(shape, is_gated=len(shape.slice_widths) == 2)
    for block in _SUM_BLOCKS:
        yield f"layer sum: blocks of {block} columns"
        yield from (_several("layer sum: blocks of columns", count) for count in (1, 2))
