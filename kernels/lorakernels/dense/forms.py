"""How the base product of a linear layer and the delta of its adapters are put together. SINGLE and
AHEAD give the same bits. DUAL and STORED may add up the ranks of a row in fewer parts, and STORED
adds the base output last, whether their streams are two or, where a device has none, one."""

from __future__ import annotations

from enum import Enum, auto

from lorakernels.dense.plan import DenseShape, may_store


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
    """Of a batch whose shrink the base product hides. A layer of few weights has a short product,
    which reads long rows of them more slowly than many short ones."""
    tuning, ranks = shape.tuning.dense, shape.ranks_of_all_slices
    out_features = sum(shape.slice_widths)
    weights = shape.in_features * out_features
    is_deep = shape.in_features >= 2 * out_features and ranks <= 2 * tuning.dual_ranks
    if weights >= tuning.dual_weights or is_deep:
        return tuning.dual_rows
    if 2 * weights < tuning.dual_weights or ranks > tuning.dual_ranks:
        return 1
    return tuning.dual_rows if may_store(shape) else tuning.dual_rows // 2
