"""Which form the input projection of a gated delta net takes."""

from __future__ import annotations

import pytest

from loragate.core.machine import select_interpreter

select_interpreter()

from lorakernels.dense.shape import DenseShape  # noqa: E402
from lorakernels.gdn.forms import GDNForm, plan_gdn  # noqa: E402


@pytest.mark.parametrize(
    ("rows", "dual_stream", "form"),
    [
        (0, True, GDNForm.MERGED),
        (1, True, GDNForm.BESIDE),
        (64, True, GDNForm.BESIDE),
        (255, True, GDNForm.BESIDE),
        (256, True, GDNForm.MERGED),
        (1, False, GDNForm.MERGED),
        (64, False, GDNForm.MERGED),
        (255, False, GDNForm.MERGED),
    ],
)
def test_the_plan_follows_the_size_and_the_switch(
    rows: int, dual_stream: bool, form: GDNForm
) -> None:
    shape = DenseShape(rows, 2048, (12288, 64), 16, 2)
    assert plan_gdn(shape, dual_stream=dual_stream) is form


@pytest.mark.parametrize(
    ("weights", "rank", "hides"),
    [
        (20_000_000, 16, True),
        (19_999_999, 16, False),
        # of both slices
        (20_000_000, 32, True),
        (20_000_000, 33, False),
        (60_000_000, 33, False),
    ],
)
def test_only_a_large_product_hides_a_shrink_of_many_rows_and_few_ranks(
    weights: int, rank: int, hides: bool
) -> None:
    def plan(rows: int) -> GDNForm:
        return plan_gdn(DenseShape(rows, 1, (weights - 64, 64), rank, 2), dual_stream=True)

    assert [plan(rows) for rows in (96, 97, 255, 256)] == [
        GDNForm.BESIDE,
        *[GDNForm.BESIDE if hides else GDNForm.MERGED] * 2,
        GDNForm.MERGED,
    ]
