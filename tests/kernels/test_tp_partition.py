from __future__ import annotations

import re

import pytest

from lorakernels.layers.partition import Parallel, Shard, Slice, cut_layer, replicas, whole

TP_SIZES = (1, 2, 3, 4, 8)


def coverage(width: int, shards: list[Shard]) -> list[int]:
    """How many ranks hold each index of a dimension."""
    return [sum(s.start <= index < s.stop for s in shards) for index in range(width)]


@pytest.mark.parametrize("tp", TP_SIZES)
@pytest.mark.parametrize("heads", [None, 1, 2, 4, 8, 24])
def test_column_cuts_of_a_slice_tile_it_as_often_as_declared(tp: int, heads: int | None) -> None:
    part = Slice("k", 48 if heads is None else heads * 6, heads=heads)
    if heads is not None and heads % tp and tp % heads:
        with pytest.raises(ValueError, match="must be a multiple or a divisor of tp_size"):
            cut_layer((part,), 16, parallel=Parallel.COLUMN, tp_size=tp, tp_rank=0)
        return
    shards = [
        cut_layer((part,), 16, parallel=Parallel.COLUMN, tp_size=tp, tp_rank=rank).columns[0]
        for rank in range(tp)
    ]
    assert set(coverage(part.width, shards)) == {replicas(part, tp)}
    assert {s.live for s in shards} == {s.size for s in shards} == {shards[0].size}
    assert sum(s.size for s in shards) == part.width * replicas(part, tp)


@pytest.mark.parametrize(("tp", "copies"), [(2, 1), (4, 2), (8, 4)])
def test_a_kv_head_is_held_by_adjacent_ranks(tp: int, copies: int) -> None:
    # sglang #24420: more ranks than kv heads
    part = Slice("v_proj", 2 * 16, heads=2)
    starts = [
        cut_layer((part,), 16, parallel=Parallel.COLUMN, tp_size=tp, tp_rank=rank).columns[0]
        for rank in range(tp)
    ]
    assert replicas(part, tp) == copies
    assert starts == [
        Shard(rank // copies * 16, (rank // copies + 1) * 16, 16) for rank in range(tp)
    ]


@pytest.mark.parametrize("tp", TP_SIZES)
@pytest.mark.parametrize("width", [1, 7, 24, 90, 96])
def test_cuts_of_a_padded_width_tile_the_unpadded_one(tp: int, width: int) -> None:
    # the stride of a rank is the padded size, the adapter ends at the real one
    padded = 96
    part = Slice("up", width, padded_width=padded)
    for parallel in (Parallel.COLUMN, Parallel.ROW):
        shards = []
        for rank in range(tp):
            cut = cut_layer(
                (part,),
                width,
                parallel=parallel,
                tp_size=tp,
                tp_rank=rank,
                padded_in_features=padded if parallel is Parallel.ROW else None,
            )
            shards.append(cut.inputs if parallel is Parallel.ROW else cut.columns[0])
        assert set(coverage(width, shards)) == {1}
        assert [s.size for s in shards] == [padded // tp] * tp
        assert [s.start for s in shards] == [min(r * padded // tp, width) for r in range(tp)]


@pytest.mark.parametrize("tp", [2, 4])
def test_each_packed_slice_is_cut_separately(tp: int) -> None:
    slices = (Slice("q", 32, heads=8), Slice("k", 8, heads=2), Slice("v", 8, heads=2))
    for rank in range(tp):
        cut = cut_layer(slices, 16, parallel=Parallel.COLUMN, tp_size=tp, tp_rank=rank)
        assert cut.columns[0] == Shard(rank * 32 // tp, (rank + 1) * 32 // tp, 32 // tp)
        assert cut.columns[1] == cut.columns[2]
        assert cut.inputs == whole(16)


@pytest.mark.parametrize("parallel", list(Parallel))
def test_only_one_dimension_is_cut_and_the_bias_is_added_once(parallel: Parallel) -> None:
    slices = (Slice("gate", 8), Slice("up", 8))
    cuts = [cut_layer(slices, 16, parallel=parallel, tp_size=4, tp_rank=rank) for rank in range(4)]
    column, row = parallel is Parallel.COLUMN, parallel is Parallel.ROW
    assert {c.columns[1].size for c in cuts} == {2 if column else 8}
    assert {c.inputs.size for c in cuts} == {4 if row else 16}
    assert [c.owns_bias for c in cuts] == ([True, False, False, False] if row else [True] * 4)


@pytest.mark.parametrize("rank", range(4))
def test_a_replicated_layer_is_whole_on_each_rank(rank: int) -> None:
    # sglang #29448: sized by tp although it is not cut; 7 and 5 have no part in 4
    cut = cut_layer((Slice("gate", 7),), 5, tp_size=4, tp_rank=rank)
    assert (cut.columns, cut.inputs, cut.owns_bias) == ((whole(7),), whole(5), True)


@pytest.mark.parametrize(
    ("part", "change", "message"),
    [
        (Slice("up", 6), {}, "slice up must be divisible by tp_size 4 (got 6)"),
        (
            Slice("up", 8, padded_width=4),
            {},
            "padded width of slice up must be at least 8 (got 4)",
        ),
        (Slice("k", 8, heads=3), {}, "heads of slice k must divide its width 8 (got 3)"),
        (
            Slice("k", 24, heads=6),
            {},
            "heads of slice k must be a multiple or a divisor of tp_size 4 (got 6)",
        ),
        (
            Slice("k", 8, heads=2, padded_width=16),
            {},
            "slice k may have heads or padded_width (got both)",
        ),
        (Slice("o", 8), {"tp_rank": 4}, "tp_rank must be 0 to 3 (got 4)"),
        (Slice("o", 8), {"tp_rank": -1}, "tp_rank must be 0 to 3 (got -1)"),
        (Slice("o", 8), {"tp_size": 0}, "tp_size must be at least 1 (got 0)"),
        (
            Slice("o", 8),
            {"padded_in_features": 16},
            "padded_in_features must be None for a column layer (got 16)",
        ),
        (
            Slice("o", 8),
            {"parallel": Parallel.ROW},
            "in_features must be divisible by tp_size 4 (got 10)",
        ),
    ],
)
def test_a_cut_that_is_not_even_is_refused(
    part: Slice, change: dict[str, int], message: str
) -> None:
    options = {"parallel": Parallel.COLUMN, "tp_size": 4, "tp_rank": 0} | change
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        cut_layer((part,), 10, **options)  # type: ignore[arg-type]
