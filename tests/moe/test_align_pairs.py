"""The tables of a routed batch, against their definition in plain Python."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from lorakernels.batch.metadata import BatchMetadata
from lorakernels.moe.align import counted
from lorakernels.moe.align.metadata import PairMetadata
from lorakernels.moe.tiles import Alignment
from lorakernels.runtime import tuning


def prepared(
    topk_ids: Tensor,
    token_slots: list[int],
    *,
    experts: int,
    slots: int,
    with_base: bool = False,
    expert_map: Tensor | None = None,
    spare: int = 5,
    dirt: int = 77,
) -> PairMetadata:
    """Tables of one step, in buffers for more tokens that held something else before."""
    rows, top_k = topk_ids.shape
    batch = BatchMetadata(max_tokens=rows + spare, max_slots=slots, device="cpu")
    batch.prepare(torch.tensor(token_slots, dtype=torch.int32))
    pairs = PairMetadata(
        max_tokens=rows + spare,
        top_k=top_k,
        num_experts=experts,
        max_slots=slots,
        device="cpu",
        with_base=with_base,
    )
    for table in pairs.buffers:
        table.fill_(dirt)
    pairs.prepare(topk_ids, batch, expert_map=expert_map)
    return pairs


def tune(monkeypatch: pytest.MonkeyPatch, **changed: int) -> None:
    """Other constants of the alignment, for every device that has not been measured."""
    align = replace(tuning.DEFAULT.align, **changed)
    monkeypatch.setattr(tuning, "DEFAULT", replace(tuning.DEFAULT, align=align))


def align_by(way: Alignment, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a step of few pairs."""
    if way is not Alignment.SORTED_AT_ONCE:
        most = 0 if way is Alignment.COUNTED else 1024
        tune(monkeypatch, pairs_at_once=0, compared_pairs=most, span=32)


# all but the radix sort, which takes other constants
WAYS = [Alignment.SORTED_AT_ONCE, Alignment.COMPARED, Alignment.COUNTED]


def routed(rows: int, top_k: int, experts: int, slots: int, seed: int) -> tuple[Tensor, list[int]]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(-1, experts, (rows, top_k), generator=generator).int()
    return ids, torch.randint(-1, slots, (rows,), generator=generator).tolist()


def buckets(ids: Tensor, token_slots: list[int], *, base: bool) -> dict[tuple[int, int], list[int]]:
    """(expert, slot) -> its pairs, ascending; `base`: (expert, 0) -> its pairs by slot."""
    found: dict[tuple[int, int], list[int]] = defaultdict(list)
    for pair, expert in enumerate(ids.flatten().tolist()):
        slot = token_slots[pair // ids.shape[1]]
        if expert >= 0 and (base or slot >= 0):
            found[expert, 0 if base else slot].append(pair)
    if base:
        for members in found.values():
            members.sort(key=lambda pair: (token_slots[pair // ids.shape[1]], pair))
    return dict(sorted(found.items()))


def cut(members: list[int], height: int) -> list[list[int]]:
    tiles = [members[i : i + height] for i in range(0, len(members), height)]
    return [tile + [-1] * (height - len(tile)) for tile in tiles]


def assert_tiles(
    table: Tensor,
    headers: list[Tensor],
    number: Tensor,
    height: int,
    want: dict[tuple[int, int], list[int]],
) -> None:
    tiles = [(key, tile) for key, members in want.items() for tile in cut(members, height)]
    assert number.item() == len(tiles)
    flat = [pair for _, tile in tiles for pair in tile]
    assert table[: len(flat)].tolist() == flat
    assert (table[len(flat) :] == -1).all()
    for position, header in enumerate(headers):
        assert header[: len(tiles)].tolist() == [key[position] for key, _ in tiles]
        assert (header[len(tiles) :] == -1).all()


@pytest.mark.parametrize("with_base", [False, True])
@pytest.mark.parametrize(
    ("rows", "top_k", "experts", "slots"),
    [(1, 1, 1, 1), (17, 3, 5, 3), (70, 2, 3, 2), (32, 8, 40, 7)],
)
@pytest.mark.parametrize("way", WAYS)
def test_every_pair_is_in_the_tiles_of_its_expert_and_slot(
    rows: int,
    top_k: int,
    experts: int,
    slots: int,
    with_base: bool,
    way: Alignment,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    align_by(way, monkeypatch)
    ids, token_slots = routed(rows, top_k, experts, slots, seed=rows)
    pairs = prepared(ids, token_slots, experts=experts, slots=slots, with_base=with_base)
    assert pairs.tables.alignment is way
    assert_tiles(
        pairs.tile_pairs,
        [pairs.tile_experts, pairs.tile_slots],
        pairs.num_tiles,
        pairs.tables.height,
        buckets(ids, token_slots, base=False),
    )
    if with_base:
        assert_tiles(
            pairs.base_pairs,
            [pairs.base_experts],
            pairs.num_base_tiles,
            pairs.tables.base_height,
            buckets(ids, token_slots, base=True),
        )


def test_more_spans_than_one_step_of_a_sum_adds_up_give_every_pair_its_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # 16 counters at a time leave 256 rows of them to a step of the sum
    span, spans = 8, 256 + 3
    tune(monkeypatch, pairs_at_once=0, compared_pairs=0, span=span)
    ids, token_slots = routed(span * spans // 4, 4, 7, 3, seed=5)
    pairs = prepared(ids, token_slots, experts=7, slots=3, with_base=True)
    assert pairs.tables.alignment is Alignment.COUNTED
    wanted, height = buckets(ids, token_slots, base=False), pairs.tables.height
    headers = [pairs.tile_experts, pairs.tile_slots]
    assert_tiles(pairs.tile_pairs, headers, pairs.num_tiles, height, wanted)
    wanted, height = buckets(ids, token_slots, base=True), pairs.tables.base_height
    assert_tiles(pairs.base_pairs, [pairs.base_experts], pairs.num_base_tiles, height, wanted)


@pytest.mark.parametrize("with_base", [False, True])
def test_more_buckets_than_a_program_can_count_give_the_same_tables(
    with_base: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids, token_slots = routed(50, 4, 6, 3, seed=3)
    wanted = prepared(ids, token_slots, experts=6, slots=3, with_base=with_base)
    tune(monkeypatch, pairs_at_once=0, compared_pairs=0, most_bins=0)
    given = prepared(ids, token_slots, experts=6, slots=3, with_base=with_base, dirt=33)
    # the counters are scratch; without base tiles their tables are too
    used = len(wanted.buffers) - 1 if with_base else 6
    for want, have in zip(wanted.buffers[:used], given.buffers[:used], strict=True):
        assert torch.equal(want, have)


def test_a_thousand_experts_and_sixty_four_slots_are_aligned() -> None:
    ids, token_slots = routed(12, 8, 1024, 64, seed=1)
    pairs = prepared(ids, token_slots, experts=1024, slots=64)
    assert_tiles(
        pairs.tile_pairs,
        [pairs.tile_experts, pairs.tile_slots],
        pairs.num_tiles,
        pairs.tables.height,
        buckets(ids, token_slots, base=False),
    )


def test_an_expert_map_leaves_foreign_experts_without_pairs() -> None:
    ids = torch.tensor([[0, 3], [1, 2], [-1, 7], [3, 9]], dtype=torch.int32)
    # four global experts, two of them here; 7 and 9 do not exist at all
    expert_map = torch.tensor([-1, 1, -1, 0], dtype=torch.int32)
    pairs = prepared(ids, [0, 1, 0, -1], experts=2, slots=2, expert_map=expert_map)
    assert pairs.pair_experts[:8].tolist() == [-1, 0, 1, -1, -1, -1, 0, -1]
    assert pairs.pair_slots[:8].tolist() == [-1, 0, 1, -1, -1, -1, -1, -1]
    assert pairs.num_tiles.item() == 2
    assert (pairs.pair_experts[8:] == -1).all()


class Recorder:
    """In place of a kernel: the layout and the constants of its launches."""

    def __init__(self) -> None:
        self.compiled: list[tuple[object, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Recorder:
        return self

    def __call__(self, *args: object, **constants: object) -> None:
        self.compiled.append((args[-1], *constants.items()))


def test_all_large_batches_are_counted_by_one_compiled_kernel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    count, place = Recorder(), Recorder()
    monkeypatch.setattr(counted, "count_pairs_kernel", count)
    monkeypatch.setattr(counted, "place_pairs_kernel", place)
    tune(monkeypatch, pairs_at_once=16, compared_pairs=16)
    for rows in (64, 512):
        ids, slots = routed(rows, 4, 4, 2, seed=rows)
        prepared(ids, slots, experts=4, slots=2, with_base=True)
    assert len(set(place.compiled)) == 2, "tiles of both batches have the same height"
    assert len(set(count.compiled)) == 1


@pytest.mark.parametrize("way", WAYS)
def test_the_one_entry_that_a_step_does_not_need_is_reset(
    way: Alignment, monkeypatch: pytest.MonkeyPatch
) -> None:
    align_by(way, monkeypatch)
    ids = torch.zeros(6, 1, dtype=torch.int32)
    pairs = prepared(ids, [0] * 6, experts=1, slots=1, with_base=True, spare=1)
    assert pairs.tables.alignment is way
    for table in (pairs.pair_slots, pairs.pair_experts):
        assert table.tolist() == [0] * 6 + [-1]


@pytest.mark.parametrize("way", WAYS)
def test_a_step_whose_tokens_have_no_expert_here_leaves_no_pair_of_the_step_before(
    way: Alignment, monkeypatch: pytest.MonkeyPatch
) -> None:
    align_by(way, monkeypatch)
    ids = torch.full((6, 1), -1, dtype=torch.int32)
    pairs = prepared(ids, [0] * 6, experts=2, slots=1, with_base=True)
    assert pairs.tables.alignment is way
    assert pairs.num_tiles.item() == pairs.num_base_tiles.item() == 0
    for table in (pairs.tile_pairs, pairs.base_pairs):
        assert (table == -1).all()


def test_a_step_without_tokens_has_no_tiles() -> None:
    ids = torch.empty(0, 2, dtype=torch.int32)
    pairs = prepared(ids, [], experts=4, slots=2, with_base=True)
    assert pairs.num_tiles.item() == 0
    assert pairs.num_base_tiles.item() == 0
    assert all((table == -1).all() for table in (pairs.tile_pairs, pairs.pair_slots))


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (torch.zeros(3, 2, dtype=torch.int64), "topk_ids must be int32"),
        (torch.zeros(3, 3, dtype=torch.int32), "topk_ids must have 2 columns"),
        (torch.zeros(3, 1, dtype=torch.int32), "topk_ids must have 2 columns"),
        (torch.zeros(4, 2, dtype=torch.int32), "topk_ids must have 3 rows"),
        (torch.zeros(2, 2, dtype=torch.int32), "topk_ids must have 3 rows"),
        (torch.zeros(2, 3, dtype=torch.int32).T, "topk_ids must be contiguous"),
    ],
)
def test_a_routing_that_does_not_fit_is_refused_by_name(ids: Tensor, message: str) -> None:
    batch = BatchMetadata(max_tokens=8, max_slots=2, device="cpu")
    batch.prepare(torch.zeros(3, dtype=torch.int32))
    pairs = PairMetadata(max_tokens=8, top_k=2, num_experts=4, max_slots=2, device="cpu")
    with pytest.raises(ValueError, match=message):
        pairs.prepare(ids, batch)


def test_an_expert_map_with_gaps_between_its_ids_is_refused() -> None:
    batch = BatchMetadata(max_tokens=8, max_slots=2, device="cpu")
    batch.prepare(torch.zeros(3, dtype=torch.int32))
    pairs = PairMetadata(max_tokens=8, top_k=2, num_experts=4, max_slots=2, device="cpu")
    every_other = torch.zeros(16, dtype=torch.int32)[::2]
    with pytest.raises(ValueError, match="expert_map must be contiguous"):
        pairs.prepare(torch.zeros(3, 2, dtype=torch.int32), batch, expert_map=every_other)
