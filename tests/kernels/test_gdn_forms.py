"""Which form the input projection of a gated delta net takes."""

from __future__ import annotations

import pytest

from loragate.core.machine import select_interpreter

select_interpreter()

from lorakernels.dense.plan import DenseShape  # noqa: E402
from lorakernels.gdn.forms import GDNForm, plan_gdn  # noqa: E402


@pytest.mark.parametrize(
    ("rows", "dual_stream", "form"),
    [
        (0, True, GDNForm.MERGED),
        (1, True, GDNForm.BESIDE),
        (64, True, GDNForm.BESIDE),
        (65, True, GDNForm.MERGED),
        (256, True, GDNForm.MERGED),
        (1, False, GDNForm.MERGED),
        (64, False, GDNForm.MERGED),
    ],
)
def test_the_plan_follows_the_size_and_the_switch(
    rows: int, dual_stream: bool, form: GDNForm
) -> None:
    shape = DenseShape(rows, 2048, (12288, 64), 16, 2)
    assert plan_gdn(shape, dual_stream=dual_stream) is form


@pytest.mark.parametrize(
    ("rows", "weights", "form"),
    [
        (1, 39_999_999, GDNForm.BESIDE),
        (1, 40_000_000, GDNForm.DUAL),
        (2, 55_999_999, GDNForm.BESIDE),
        (2, 56_000_000, GDNForm.DUAL),
        (8, 56_000_000, GDNForm.DUAL),
        (9, 56_000_000, GDNForm.BESIDE),
        (64, 56_000_000, GDNForm.BESIDE),
        (65, 56_000_000, GDNForm.MERGED),
    ],
)
def test_large_products_run_beside_each_other(rows: int, weights: int, form: GDNForm) -> None:
    # of all columns, those of ba included
    shape = DenseShape(rows, 1, (weights - 64, 64), 16, 2)
    assert plan_gdn(shape, dual_stream=True) is form
    assert plan_gdn(shape, dual_stream=False) is GDNForm.MERGED
