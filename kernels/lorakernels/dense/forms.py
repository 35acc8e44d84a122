"""How the base product of a linear layer and the delta of its adapters are put together. SINGLE and
AHEAD give the same bits. DUAL and STORED may add up the ranks of a row in fewer parts, and STORED
adds the base output last, whether their streams are two or, where a device has none, one."""

from __future__ import annotations

from enum import Enum, auto

from lorakernels.dense.shape import DenseShape
from lorakernels.dense.sizes import may_store


class LinearForm(Enum):
    """The order of base product, shrink and expand."""

    # one stream: base, shrink, expand. The expand starts while the shrink still runs
    SINGLE = auto()
    # one stream: shrink, base, expand
    AHEAD = auto()
    # two streams: the shrink beside the base, the expand behind both
    DUAL = auto()
    # two streams: shrink and expand beside the base, into a delta that is added behind both
    STORED = auto()

    @property
    def is_dual(self) -> bool:
        return self in (LinearForm.DUAL, LinearForm.STORED)


def plan_form(shape: DenseShape, *, dual_stream: bool) -> LinearForm:
    """The fastest form for a batch; one of a single stream without `dual_stream`."""
    shape = shape.planned
    if not dual_stream or not 0 < shape.num_rows <= _most_rows_beside(shape):
        return LinearForm.SINGLE
    return LinearForm.STORED if may_store(shape) else LinearForm.DUAL


def _most_rows_beside(shape: DenseShape) -> int:
    """Of a batch whose shrink the base product hides."""
    tuning, ranks = shape.tuning.dense, shape.ranks_of_all_slices
    weights = shape.in_features * sum(shape.slice_widths)
    if weights < tuning.dual_weights:
        return _most_rows_beside_few_weights(shape)
    if ranks <= tuning.dual_ranks:
        return tuning.dual_more_rows
    if ranks <= tuning.dual_most_ranks:
        return tuning.dual_more_rows * 3 // 4
    # the more ranks, the more weights take as long to read as A
    fewest = tuning.dual_weights * ranks / tuning.dual_most_ranks
    return tuning.dual_rows if weights >= fewest else 0


def _most_rows_beside_few_weights(shape: DenseShape) -> int:
    """Their product is short: it hides a delta that is stored, and not a shrink whose expand comes
    behind it."""
    tuning, ranks = shape.tuning.dense, shape.ranks_of_all_slices
    out_features, is_narrow = sum(shape.slice_widths), 2 * ranks <= tuning.dual_ranks
    if ranks > 2 * tuning.dual_ranks or shape.in_features < tuning.dual_features:
        return 1
    if _has_long_weights(shape):
        return tuning.dual_more_rows if is_narrow else tuning.dual_rows * 3 // 2
    is_square = shape.in_features >= out_features
    if not may_store(shape):
        return 1
    if not is_square or ranks > tuning.dual_ranks:
        return tuning.dual_rows
    if 2 * shape.in_features * out_features < tuning.dual_weights:
        return tuning.dual_more_rows
    # a product of more rows already has all multiprocessors at work, and few ranks leave little to
    # hide
    return tuning.dual_rows * 3 // 4 if is_narrow else tuning.dual_rows


def _has_long_weights(shape: DenseShape) -> bool:
    """Whether rows of the weights are long and few: they are read more slowly than many short
    ones, so that there is more time beside the product."""
    return shape.in_features >= 2 * sum(shape.slice_widths)
