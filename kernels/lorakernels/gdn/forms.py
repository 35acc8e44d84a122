"""How the two base products of a gated delta net's input are computed."""

from __future__ import annotations

from enum import Enum, auto

from lorakernels.dense.plan import DenseShape


class GDNForm(Enum):
    """The base products of one input with qkvz and with ba, and the shrink of the adapters. The
    expand is behind all of them. SERIAL and DUAL run the same kernels and give the same bits, and
    so do MERGED and BESIDE; one product of all columns may add up in another order than two."""

    # one stream: ba, qkvz, shrink
    SERIAL = auto()
    # three streams: qkvz, beside ba, beside the shrink
    DUAL = auto()
    # one stream: one product of all columns, shrink
    MERGED = auto()
    # two streams: one product of all columns, beside the shrink
    BESIDE = auto()


def plan_gdn(shape: DenseShape, *, dual_stream: bool) -> GDNForm:
    """The fastest form for a batch; one of a single stream without `dual_stream`."""
    is_small = 0 < shape.num_rows <= shape.tuning.gdn.dual_rows
    return GDNForm.DUAL if dual_stream and is_small else GDNForm.MERGED
