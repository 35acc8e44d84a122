"""Every branch that some case of a site can take, from a grid of sizes."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import chain, product

from loragate.matrix.case import Site
from loragate.subjects.lorakernels import linear
from loragate.subjects.lorakernels.branches.dense import (
    delta_net_form,
    dense_branches,
    hidden_shrink,
    linear_form,
    look_up_branches,
)
from loragate.subjects.lorakernels.branches.moe import (
    SUM_BLOCKS,
    alignment_branches,
    delta_branches,
    product_branches,
)
from loragate.subjects.lorakernels.branches.text import several
from lorakernels.dense.forms import LinearForm
from lorakernels.dense.shape import DenseShape
from lorakernels.gdn.forms import GDNForm
from lorakernels.moe.delta.plan import MoEPath, MoEShape

# those that a plan takes
_LINEAR_FORMS = (LinearForm.SINGLE, *linear.FORMS.values())
_RANKS = (8, 17, 33, 65, 129, 512)
_DEPTHS = (16, 200, 4096, 8192)
_WIDTHS = ((8,), (24,), (64,), (128, 128), (300, 200), (4608, 4608), (9000,))


@cache
def all_branches(site: Site) -> tuple[str, ...]:
    """Every branch that some case of a site can take, in alphabetical order."""
    if site is Site.MOE_LAYER:
        found = _grid_of_layers()
    elif site is Site.MOE_DELTA:
        found = _grid_of_deltas()
    elif site is Site.GDN_IN_PROJ:
        found = iter(
            [delta_net_form(GDNForm.MERGED, is_chosen=True), *map(delta_net_form, GDNForm)]
        )
    elif site is Site.EMBEDDING:
        found = _grid_of_look_ups()
    else:
        found = chain(_grid_of_dense(), _grid_of_linears())
    return tuple(sorted(set(found)))


def _grid_of_look_ups() -> Iterator[str]:
    for rows, rank, slots in product((1, 8192), _RANKS, (2, 64)):
        yield from look_up_branches(DenseShape(rows, 1, (8,), rank, 2), slots=slots)
    yield from look_up_branches(DenseShape(64, 1, (8,), 8, 2), slots=64)


def _grid_of_dense() -> Iterator[str]:
    rows = (1, 50, 100, 150, 1024, 1100, 2050, 8192)
    sizes = product(rows, _DEPTHS, (*_WIDTHS, (6500, 6500)), _RANKS, (2, 4))
    for count, depth, widths, rank, size in sizes:
        for slots, live in ((2, count), (64, count - (count + 2) // 4)):
            yield from dense_branches(
                DenseShape(count, depth, widths, rank, size), live=live, slots=slots
            )


def _grid_of_linears() -> Iterator[str]:
    """Besides the dense delta."""
    yield from map(linear_form, _LINEAR_FORMS)
    # no plan hides a shrink of more rows
    for rows, depth in product((1, 100, 150), (16, 8192)):
        yield hidden_shrink(DenseShape(rows, depth, (64,), 8, 2))


def _moe_shapes(pairs: tuple[int, ...]) -> Iterator[MoEShape]:
    sizes = product(pairs, (1, 16, 256), _DEPTHS[:3], _WIDTHS, _RANKS, (2, 4))
    for count, experts, depth, widths, rank, size in sizes:
        yield MoEShape(count, experts, depth, widths, rank, size)


def _grid_of_deltas() -> Iterator[str]:
    for shape in _moe_shapes((2, 100, 600, 1100, 2**16)):
        slots = 4 if shape.num_experts == 16 else 64
        yield from alignment_branches(shape, slots, with_base=False)
        for wanted in (None, *MoEPath):
            yield from delta_branches(shape, wanted, slots=slots)


def _grid_of_layers() -> Iterator[str]:
    for shape in _moe_shapes((2, 12, 30, 200, 600, 1100, 2**16)):
        if len(set(shape.slice_widths)) == 1:
            yield from alignment_branches(
                shape, 4 if shape.num_experts < 256 else 64, with_base=True
            )
            yield from product_branches(shape, is_gated=len(shape.slice_widths) == 2)
    for block in SUM_BLOCKS:
        yield f"layer sum: blocks of {block} columns"
        yield from (several("layer sum: blocks of columns", count) for count in (1, 2))
