"""How the base product of a linear layer and the delta of its adapters are put together. SINGLE and
AHEAD give the same bits. DUAL may add up the ranks of a row in fewer parts, whether its streams
are two or, where a device has none, one."""

from __future__ import annotations

from enum import Enum, auto

from lorakernels.dense.plan import DenseShape


class LinearForm(Enum):
    """The order of base product, shrink and expand."""

    # one stream: base, shrink, expand. The expand starts while the shrink still runs
    SINGLE = auto()
    # one stream: shrink, base, expand
    AHEAD = auto()
    # two streams: the shrink beside the base, the expand behind both
    DUAL = auto()


def plan_form(shape: DenseShape, *, dual_stream: bool) -> LinearForm:
    """The fastest form for a batch; one of a single stream without `dual_stream`."""
    tuning = shape.tuning.dense
    is_small = shape.num_rows > 0 and shape.planned.num_rows <= tuning.dual_rows
    is_light = shape.ranks_of_all_slices <= tuning.dual_ranks
    is_large = shape.in_features * sum(shape.slice_widths) >= tuning.dual_weights
    wins = is_small and (is_light or is_large)
    return LinearForm.DUAL if dual_stream and wins else LinearForm.SINGLE
