"""The columns of the input projections of a gated delta net, and what each rank holds of them."""

from __future__ import annotations

import pytest

from loragate.matrix.delta_net import Columns, DeltaNet, columns_of, delta_net


def test_four_widths_say_what_heads_there_are() -> None:
    assert delta_net((10240, 6144, 48, 48), 16) == DeltaNet(16, 48, 128, 128)
    assert delta_net((31, 21, 3, 3), 1) == DeltaNet(1, 3, 5, 7)


@pytest.mark.parametrize(("qkvz", "ba", "heads"), [(12288, 64, 16), (64, 8, 2), (88, 16, 4)])
def test_two_widths_are_those_of_some_net_with_that_many_heads(
    qkvz: int, ba: int, heads: int
) -> None:
    net = delta_net((qkvz, ba), heads)
    assert 2 * net.key_heads * net.key_size + 2 * net.value_heads * net.value_size == qkvz
    assert (net.key_heads, 2 * net.value_heads) == (heads, ba)
    assert min(net.key_size, net.value_size) >= 1


def test_columns_stand_by_key_head_or_by_kind() -> None:
    assert columns_of((64, 8), 2) == ((Columns(64, 2),), (Columns(8, 2),))
    keys, values, scalars = Columns(8, 2), Columns(24, 4), Columns(4, 4)
    assert columns_of((40, 24, 4, 4), 2) == (
        (keys, keys, values),
        (values,),
        (scalars,),
        (scalars,),
    )


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_ranks_hold_whole_heads_and_together_all_of_them_equally_often(tp: int) -> None:
    kind = Columns(24, 4)
    held = [column for rank in range(tp) for column in range(*kind.local(tp, rank))]
    assert sorted(held) == sorted([*range(24)] * max(1, tp // 4))
    for rank in range(tp):
        start, stop = kind.local(tp, rank)
        assert (start % 6, stop % 6) == (0, 0)


@pytest.mark.parametrize(
    ("heads", "held"), [(2, [0, 0, 0, 0, 1, 1, 1, 1]), (4, [0, 0, 1, 1, 2, 2, 3, 3])]
)
def test_of_fewer_heads_than_ranks_neighbours_hold_the_same_one(
    heads: int, held: list[int]
) -> None:
    kind = Columns(6 * heads, heads)
    assert [kind.local(8, rank) for rank in range(8)] == [(6 * h, 6 * h + 6) for h in held]
