"""What of a MoE layer runs beside what.

All forms give the same bits: where a product is cut into two launches, its sums are kept in fp32
between them. Only of quantised weights, whose sums are scaled, the compiler may round a cut product
once more.
"""

from __future__ import annotations

from enum import Enum, auto

from lorakernels.runtime.tuning import Tuning


class MoEForm(Enum):
    """The routed experts, with a shrink and a product each for w13 and w2, and the shared experts
    of the layer, if it has any."""

    # one stream: shared experts, alignment, then for w13 and for w2 the shrink and the product with
    # the expand folded in. The product starts while the shrink still runs
    SINGLE = auto()
    # the shared experts beside all that is routed, alignment included, which is as in SINGLE
    BESIDE = auto()
    # as BESIDE, and each shrink beside the sums of its product, the rest of the product behind both
    DUAL = auto()


def plan_form(num_pairs: int, tuning: Tuning, *, dual_stream: bool) -> MoEForm:
    """The fastest form for a batch; one of a single stream without `dual_stream`."""
    if not dual_stream or not num_pairs:
        return MoEForm.SINGLE
    planned = tuning.moe.planned_pairs or num_pairs
    return MoEForm.DUAL if planned <= tuning.moe.dual_pairs else MoEForm.BESIDE


def sharded_form(form: MoEForm | None) -> MoEForm:
    """That of a layer whose adapters are sharded by rank, which exchanges between its launches.
    ValueError for another one."""
    if form not in (None, MoEForm.SINGLE):
        raise ValueError(f"form of a layer sharded by rank must be SINGLE (got {form.name})")
    return MoEForm.SINGLE
