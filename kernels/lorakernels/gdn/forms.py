"""How the two base products of a gated delta net's input are computed."""

from __future__ import annotations

from enum import Enum, auto

from lorakernels.dense.shape import DenseShape


class GDNForm(Enum):
    """The base products of one input with qkvz and with ba, and the shrink of the adapters. The
    expand is behind all of them. One product of all columns may add up in another order than two,
    and a shrink beside others in fewer parts than one behind them."""

    # one stream: ba, qkvz, shrink
    SERIAL = auto()
    # three streams: qkvz, beside ba, beside the shrink
    DUAL = auto()
    # one stream: one product of all columns, shrink
    MERGED = auto()
    # two streams: one product of all columns, beside the shrink
    BESIDE = auto()


# one product of all columns
_OF_ONE_PRODUCT = (GDNForm.MERGED, GDNForm.BESIDE)


def plan_gdn(shape: DenseShape, *, dual_stream: bool, may_join: bool = True) -> GDNForm:
    """The fastest form for a batch; one of a single stream without `dual_stream`, and one of two
    products where the weights of qkvz and ba do not fit into one product."""
    if not may_join:
        return GDNForm.DUAL if dual_stream and shape.num_rows else GDNForm.SERIAL
    rows = shape.planned.num_rows
    if not dual_stream or shape.num_rows == 0 or rows > _most_rows_beside(shape):
        return GDNForm.MERGED
    return GDNForm.BESIDE


def _most_rows_beside(shape: DenseShape) -> int:
    """Of a batch whose shrink the product of all columns hides."""
    tuning = shape.tuning
    hides_more = (
        shape.in_features * sum(shape.slice_widths) >= tuning.dense.dual_weights
        and shape.ranks_of_all_slices <= tuning.dense.dual_ranks
    )
    return tuning.gdn.dual_rows_of_few_ranks if hides_more else tuning.gdn.dual_rows


def check_form(form: GDNForm | None, *, is_one_format: bool) -> None:
    """ValueError for a form that the weights cannot have."""
    if form in _OF_ONE_PRODUCT and not is_one_format:
        raise ValueError(
            "form must be SERIAL or DUAL where the weights of qkvz and ba have different formats "
            f"(got {form.name})"
        )
