"""The branches that the first batch of a case takes."""

from __future__ import annotations

from loragate.inputs.mapping import num_padded
from loragate.matrix.case import Case, Dtype, Parallel, Path, Plans, Sharding, Site
from loragate.subjects.lorakernels.branches.dense import (
    delta_net_branches,
    dense_branches,
    linear_branches,
    look_up_branches,
)
from loragate.subjects.lorakernels.branches.moe import (
    alignment_branches,
    delta_branches,
    layer_branches,
)
from lorakernels.dense.shape import DenseShape
from lorakernels.moe.delta.plan import MoEPath, MoEShape
from lorakernels.runtime.tuning import DEFAULT, Tuning, with_one_plan


def branches(case: Case) -> frozenset[str]:
    """The branches that the first batch of a case takes; none for a batch without rows."""
    if not case.tokens:
        return frozenset()
    if case.sharding is Sharding.RANK:
        # its two plans are of two ranks; each is that of some other case
        return frozenset()
    size = 4 if case.dtype is Dtype.FP32 else 2
    if case.site is Site.MOE_LAYER:
        return frozenset(layer_branches(case, size, _tuning(case)))
    if case.site is Site.MOE_DELTA:
        pairs = case.tokens * case.top_k
        sizes = (pairs, case.experts, case.in_features, case.slices, case.rank, size)
        of_delta = MoEShape(*sizes, _tuning(case))
        wanted = None if case.path is Path.PLAN else MoEPath[case.path.name]
        aligned = alignment_branches(of_delta, case.slots, with_base=False)
        return frozenset([*delta_branches(of_delta, wanted, slots=case.slots), *aligned])
    if case.site is Site.GDN_IN_PROJ:
        return frozenset(delta_net_branches(case, size))
    if case.site is Site.EMBEDDING:
        shape = DenseShape(case.tokens, 1, case.slices, case.rank, size)
        return frozenset(look_up_branches(shape, slots=case.slots))
    by_columns = case.tp if case.parallel is Parallel.COLUMN else 1
    by_rows = case.tp if case.parallel is Parallel.ROW else 1
    widths = tuple(-(-width // by_columns) for width in case.slices)
    depth = -(-case.in_features // by_rows)
    shape = DenseShape(case.tokens, depth, widths, case.rank, size, _tuning(case))
    taken = dense_branches(shape, live=case.tokens - num_padded(case), slots=case.slots)
    return frozenset([*taken, *linear_branches(case, shape)])


def _tuning(case: Case) -> Tuning:
    return with_one_plan(DEFAULT) if case.plans is Plans.ONE else DEFAULT
