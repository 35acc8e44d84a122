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


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ([4, 9], r"sizes must be 1 to 8, which is max_tokens \(got 9\)"),
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
