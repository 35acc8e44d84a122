"""The cut of a MoE layer over its ranks: complete, without overlap, independent of padding."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lorakernels.layers.moe_partition import MoECut, MoERank, cut_moe

SIZES = st.integers(1, 8)


def group(ep: int, tp: int) -> list[MoERank]:
    return [MoERank.of_group(rank, ep_size=ep, tp_size=tp) for rank in range(ep * tp)]


def owners(cuts: list[MoECut], expert: int, column: int) -> int:
    """How many ranks hold one column of one expert."""
    return sum(
        expert in cut.experts.ids and cut.intermediate.start <= column < cut.intermediate.stop
        for cut in cuts
    )


@settings(max_examples=60)
@given(ep=SIZES, tp=SIZES, extra=st.integers(0, 5), width=st.integers(1, 9), pad=st.integers(0, 9))
def test_all_ranks_together_hold_each_element_exactly_once(
    ep: int, tp: int, extra: int, width: int, pad: int
) -> None:
    experts, padded = ep + extra, -(-(width + pad) // tp) * tp
    cuts = [cut_moe(experts, width, rank, padded_intermediate=padded) for rank in group(ep, tp)]
    assert {owners(cuts, e, c) for e in range(experts) for c in range(width)} == {1}
    assert {cut.intermediate.size for cut in cuts} == {padded // tp}
    # one more or one less, so that no rank waits for another
    assert max(c.experts.size for c in cuts) - min(c.experts.size for c in cuts) <= 1


@settings(max_examples=60)
@given(ep=SIZES, tp=SIZES, extra=st.integers(0, 5))
def test_each_expert_is_local_to_the_ranks_of_one_part_and_dense_there(
    ep: int, tp: int, extra: int
) -> None:
    experts = ep + extra
    cuts = [cut_moe(experts, 8 * tp, rank) for rank in group(ep, tp)]
    for cut in cuts:
        assert cut.experts.run is not None
        assert list(cut.experts.run) == list(cut.experts.ids)
    for expert in range(experts):
        assert sum(cut.experts.ids.count(expert) for cut in cuts) == tp


def test_ranks_that_share_experts_are_adjacent() -> None:
    # sglang #24171, vllm #38021: the rank of the group was taken for that of the slices, and
    # ranks 2 and 3 got nothing
    ranks = group(2, 2)
    assert [(r.ep_rank, r.tp_rank) for r in ranks] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    cuts = [cut_moe(4, 6, rank) for rank in ranks]
    assert [(c.experts.ids[0], c.intermediate.start) for c in cuts] == [
        (0, 0),
        (0, 3),
        (2, 0),
        (2, 3),
    ]
    assert all(cut.experts.size and cut.intermediate.live for cut in cuts)


def test_the_stride_of_a_rank_is_the_padded_size_and_its_end_the_real_one() -> None:
    cuts = [
        cut_moe(2, 90, MoERank(tp_size=4, tp_rank=r), padded_intermediate=128) for r in range(4)
    ]
    found = [(c.intermediate.start, c.intermediate.stop, c.intermediate.size) for c in cuts]
    assert found == [(0, 32, 32), (32, 64, 32), (64, 90, 32), (90, 90, 32)]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: MoERank(ep_size=0), "ep_size must be at least 1 (got 0)"),
        (lambda: MoERank(tp_size=2, tp_rank=2), "tp_rank must be 0 to 1 (got 2)"),
        (lambda: MoERank(ep_size=2, ep_rank=-1), "ep_rank must be 0 to 1 (got -1)"),
        (
            lambda: MoERank.of_group(0, ep_size=0, tp_size=2),
            "ep_size and tp_size must be at least 1 (got 0 and 2)",
        ),
        (
            lambda: MoERank.of_group(0, ep_size=2, tp_size=-1),
            "ep_size and tp_size must be at least 1 (got 2 and -1)",
        ),
        (
            lambda: MoERank.of_group(4, ep_size=2, tp_size=2),
            "rank must be 0 to 3 (got 4)",
        ),
        (lambda: cut_moe(2, 8, MoERank(ep_size=3)), "experts must be at least ep_size 3 (got 2)"),
        (
            lambda: cut_moe(2, 9, MoERank(tp_size=2)),
            "intermediate size must be divisible by tp_size 2 (got 9)",
        ),
        (
            lambda: cut_moe(2, 9, MoERank(), padded_intermediate=8),
            "padded width of intermediate size must be at least 9 (got 8)",
        ),
    ],
)
def test_a_wrong_cut_is_refused_by_field(make: object, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        make()  # type: ignore[operator]
