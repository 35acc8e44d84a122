"""Branches of the dense delta, linear layers, inputs of delta nets and look-ups."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from loragate.matrix.case import Case, Site, Streams
from loragate.subjects.lorakernels import linear
from loragate.subjects.lorakernels.branches.text import several
from loragate.subjects.lorakernels.gdn import FORMS
from lorakernels.batch.metadata import tile_height
from lorakernels.dense import plan as dense
from lorakernels.dense.expand_plan import plan_expand
from lorakernels.dense.forms import LinearForm
from lorakernels.dense.shape import DenseShape
from lorakernels.gdn.forms import GDNForm, plan_gdn


def dense_branches(shape: DenseShape, *, live: int, slots: int) -> Iterator[str]:
    yield f"dense tile: {shape.height} rows"
    # what the preparation reads at a time, of a batch of that many rows
    block = 1024 if shape.num_rows <= 1024 else 4096
    yield several("dense tile: blocks of rows to sort", -(-shape.num_rows // block))
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
    yield several("dense shrink: steps of a program", -(-steps // shrink.splits))
    yield several("dense shrink: blocks of ranks", -(-total // shrink.block_n))
    if shrink.block_n > shape.rank and total > shape.rank:
        yield "dense shrink: a block of ranks of several slices"
    yield f"dense shrink: reads {'all' if shrink.reads_all_ranks else 'live'} ranks"
    yield f"dense shrink: the expand starts {'early' if shrink.trigger_early else 'late'}"
    yield f"dense expand, {kind}: {expand.block_m} rows x {expand.block_n} columns"
    yield f"dense expand: blocks of {expand.block_r} ranks"
    yield several("dense expand: blocks of ranks", -(-shape.rank // expand.block_r))
    blocks = -(-max(shape.slice_widths) // expand.block_n)
    yield several("dense expand: blocks of columns", blocks)
    of_rows = f"dense expand of {expand.block_m} rows"
    yield several(f"{of_rows}: blocks of columns of a program", min(expand.group, blocks))
    yield several("dense expand: parts of a tile", shape.height // expand.block_m)


def linear_branches(case: Case, shape: DenseShape) -> Iterator[str]:
    if case.site is Site.LORA_LINEAR:
        is_dual = case.streams is Streams.DUAL
        yield linear_form(linear.FORMS[case.beside] if is_dual else LinearForm.SINGLE)
        if is_dual:
            yield hidden_shrink(shape)


def hidden_shrink(shape: DenseShape) -> str:
    """It has a plan of its own."""
    is_split = dense.plan_shrink(replace(shape, beside=True)).splits > 1
    split = "split" if is_split else "whole"
    return f"shrink beside a product: tiles of {shape.height} rows, K is {split}"


def linear_form(form: LinearForm) -> str:
    return f"linear layer: {form.name.lower()}"


def delta_net_branches(case: Case, size: int) -> Iterator[str]:
    """What is not that of any linear layer."""
    form = FORMS[case.products, case.streams]
    if form is not None:
        yield delta_net_form(form)
        return
    shape = DenseShape(case.tokens, case.in_features, case.slices, case.rank, size)
    yield delta_net_form(plan_gdn(shape, dual_stream=False), is_chosen=True)


def delta_net_form(form: GDNForm, *, is_chosen: bool = False) -> str:
    return f"input of a delta net: {form.name.lower()}{' chosen' if is_chosen else ''}"


def look_up_branches(shape: DenseShape, *, slots: int) -> Iterator[str]:
    """Tiles and the expand are those of the dense delta."""
    yield several("look-up: blocks of ranks", -(-shape.rank // dense.looked_up_ranks(shape)))
    programs = dense.tile_programs(shape, capacity=shape.num_rows + slots)
    most = "more" if min(slots - 1, shape.num_rows) > programs else "no more"
    yield f"look-up: {most} tiles than programs"
