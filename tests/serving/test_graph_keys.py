"""Which captured graph a batch gets; no device is needed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lorakernels.serving.keys import GraphKey, choose_key, dummy_slots, plan_keys

SIZES = st.sets(st.integers(1, 40), max_size=8)


@given(sizes=SIZES, rows=st.integers(0, 45), adapters=st.booleans())
def test_a_batch_gets_the_smallest_captured_size_that_holds_it(
    sizes: set[int], rows: int, adapters: bool
) -> None:
    key = choose_key(sorted(sizes), num_rows=rows, has_adapters=adapters)
    fits = [size for size in sizes if size >= rows]
    assert key == (GraphKey(min(fits), adapters) if fits else None)


@given(sizes=SIZES)
def test_all_sizes_are_captured_with_and_without_adapters_and_the_largest_first(
    sizes: set[int],
) -> None:
    keys = plan_keys(sizes, max_tokens=40)
    assert set(keys) == {GraphKey(size, has) for size in sizes for has in (True, False)}
    assert len(keys) == 2 * len(sizes)
    rows = [key.num_tokens for key in keys]
    assert rows == sorted(rows, reverse=True)


@given(sizes=SIZES, width=st.integers(2, 6))
def test_requests_of_several_rows_have_graphs_of_their_own(sizes: set[int], width: int) -> None:
    keys = plan_keys(sizes, max_tokens=40 * width, widths=(1, width))
    shapes = {(size * rows, rows) for size in sizes for rows in (1, width)}
    assert {(key.num_tokens, key.width) for key in keys} == shapes
    assert len(keys) == 4 * len(sizes)
    rows = [key.num_tokens for key in keys]
    assert rows == sorted(rows, reverse=True)
    own = sorted(size * width for size in sizes)
    for size in sizes:
        key = choose_key(own, num_rows=size * width, has_adapters=True, width=width)
        assert key == GraphKey(size * width, True, width)


def test_sizes_are_numbers_of_requests_where_these_have_several_rows() -> None:
    assert plan_keys([4], max_tokens=8, widths=(1, 2))
    with pytest.raises(ValueError, match=r"sizes must be 1 to 4, which is max_tokens / 2 .got 5"):
        plan_keys([5], max_tokens=8, widths=(1, 2))
    # the last row is half a request
    with pytest.raises(ValueError, match=r"sizes must be 1 to 3, which is max_tokens / 2 .got 4"):
        plan_keys([4], max_tokens=7, widths=(1, 2))


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ([4, 9], r"sizes must be 1 to 8, which is max_tokens \(got 9\)"),
        ([1.5], r"sizes must be 1 to 8, which is max_tokens \(got 1.5\)"),
        ([0], r"sizes must be 1 to 8, which is max_tokens \(got 0\)"),
        ([4, 2, 4], r"sizes must differ \(got \[4, 4, 2\]\)"),
    ],
)
def test_sizes_that_cannot_be_captured_are_refused(sizes: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan_keys(sizes, max_tokens=8)


@given(rows=st.integers(1, 40), slots=st.integers(1, 9))
def test_a_dummy_run_has_every_slot_and_base_rows_as_far_as_its_rows_go(
    rows: int, slots: int
) -> None:
    found = dummy_slots(rows, slots)
    assert len(found) == rows
    assert set(found) <= {-1, *range(slots)}
    assert found[0] == 0
    assert rows == 1 or found[-1] == -1
    if rows > slots:
        assert set(found) == {-1, *range(slots)}
