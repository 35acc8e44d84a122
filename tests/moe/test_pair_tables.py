"""Every table of the alignment, to its very end, against a plain loop over dictionaries, step after
step on the same buffers; and the sizes of the buffers."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from loragate.core.machine import detect_machine, select_interpreter

select_interpreter()

from loragate.execution.kernel_compiles import kernels_compiled  # noqa: E402
from lorakernels.batch.metadata import BatchMetadata  # noqa: E402
from lorakernels.moe.align.metadata import PairMetadata  # noqa: E402
from lorakernels.moe.align.tables import PairTables  # noqa: E402
from lorakernels.moe.delta.ops import MoEWorkspace  # noqa: E402
from lorakernels.moe.delta.plan import MoEShape  # noqa: E402
from lorakernels.moe.delta.sizes import shrunk_shape  # noqa: E402
from lorakernels.moe.tiles import Alignment, base_tile_height, tile_height  # noqa: E402
from lorakernels.moe.weights import ExpertWeights  # noqa: E402

DEVICE = detect_machine().device
_NOTHING = -1


@dataclass(frozen=True, slots=True)
class _Scene:
    """Steps of `tokens` rows, one after the other on the same tables."""

    what: str
    tokens: tuple[int, ...]
    top_k: int
    experts: int
    slots: int
    mapped: bool = False
    with_base: bool = False
    # tokens beyond the largest step that the tables have capacity for
    spare: int = 0


_SCENES = (
    _Scene("a few pairs", (9, 4, 0), 3, experts=5, slots=3, with_base=True),
    _Scene("full slots", (30, 7), 2, experts=3, slots=4, with_base=True, spare=200),
    _Scene("experts elsewhere", (40, 12), 2, experts=4, slots=2, mapped=True),
    _Scene(
        "a long batch", (1300, 700, 300, 20), 2, experts=6, slots=2, mapped=True, with_base=True
    ),
    _Scene("as many buckets as pairs", (16,), 1, experts=16, slots=1),
    _Scene("more buckets than counters", (12, 5), 2, experts=1024, slots=9, mapped=True),
)


def test_tables_that_no_step_has_filled_hold_no_pair() -> None:
    pairs = PairMetadata(
        max_tokens=5, top_k=2, num_experts=4, max_slots=2, device=DEVICE, with_base=True
    )
    tables = (pairs.pair_slots, pairs.pair_experts, pairs.tile_slots, pairs.tile_experts)
    for table in (*tables, pairs.tile_pairs, pairs.base_experts, pairs.base_pairs):
        assert table.tolist() == [_NOTHING] * len(table)
    assert (int(pairs.num_tiles), int(pairs.num_base_tiles), pairs.num_rows) == (0, 0, 0)


@pytest.mark.parametrize(
    ("tokens", "top_k", "experts"), [(512, 8, 2), (64, 8, 1), (300, 4, 8), (30, 2, 3), (9, 3, 5)]
)
def test_each_base_tile_has_a_program_also_where_a_token_chooses_an_expert_again_and_again(
    tokens: int, top_k: int, experts: int
) -> None:
    """As all padded rows of some servers do, whose ids are 0."""
    pairs = PairMetadata(
        max_tokens=tokens,
        top_k=top_k,
        num_experts=experts,
        max_slots=2,
        device=DEVICE,
        with_base=True,
    )
    step = PairTables.of(pairs.buffers, tokens, pairs.sizes)
    for chosen in range(1, experts + 1):
        # all experts but one have one pair each
        of_last = tokens * top_k - (chosen - 1)
        tiles = chosen - 1 + math.ceil(of_last / step.base_height)
        assert step.base_tile_programs >= tiles


@pytest.mark.parametrize("scene", _SCENES, ids=lambda scene: scene.what)
def test_every_table_of_every_step_is_that_of_a_plain_loop(scene: _Scene) -> None:
    pairs = PairMetadata(
        max_tokens=scene.tokens[0] + scene.spare,
        top_k=scene.top_k,
        num_experts=scene.experts,
        max_slots=scene.slots,
        device=DEVICE,
        with_base=scene.with_base,
    )
    for step, tokens in enumerate(scene.tokens):
        _compare_tables(scene, pairs, step, tokens)


# steps of one way whose tiles have the same height: of numbers of pairs and of their spans that
# Triton would compile a kernel for, which are 1 and multiples of 16, and of others
_SPECIALISED = {
    Alignment.SORTED_AT_ONCE: (2, (20, 16, 1, 17)),
    Alignment.COMPARED: (2, (520, 1024, 521)),
    Alignment.COUNTED: (2, (1100, 1936, 1101)),
    Alignment.SORTED: (128, (1900, 2016, 1901)),
}


def _specialised(way: Alignment) -> tuple[PairMetadata, BatchMetadata, tuple[int, ...]]:
    slots, sizes = _SPECIALISED[way]
    most = {"max_tokens": max(sizes), "max_slots": slots}
    pairs = PairMetadata(**most, top_k=1, num_experts=128, device=DEVICE)
    return pairs, BatchMetadata(**most, device=DEVICE), sizes


@pytest.mark.skipif(DEVICE == "cpu", reason="needs compiled kernels on a GPU")
@pytest.mark.parametrize("way", list(Alignment))
def test_a_number_of_pairs_that_could_be_specialised_on_compiles_no_kernel_anew(
    way: Alignment,
) -> None:
    pairs, batch, sizes = _specialised(way)
    compiled: list[str] = []
    for tokens in sizes:
        batch.prepare(torch.zeros(tokens, dtype=torch.int32))
        ids = torch.zeros(tokens, 1, dtype=torch.int32, device=DEVICE)
        with kernels_compiled(compiled):
            pairs.prepare(ids, batch)
        if tokens == sizes[0]:
            # no other test has such tables
            assert compiled, "the kernels were compiled before"
            compiled.clear()
    assert not compiled


@pytest.mark.parametrize("way", list(Alignment))
def test_numbers_of_pairs_that_could_be_specialised_on_take_every_way_with_equal_tiles(
    way: Alignment,
) -> None:
    pairs, _, sizes = _specialised(way)
    steps = [PairTables.of(pairs.buffers, tokens, pairs.sizes) for tokens in sizes]
    assert {step.alignment for step in steps} == {way}
    assert len({(step.height, step.base_height) for step in steps}) == 1
    assert {tokens % 16 == 0 for tokens in sizes} == {False, True}


def test_tables_without_base_tiles_take_kernels_that_no_height_of_these_tiles_varies() -> None:
    def heights(*, with_base: bool) -> set[int]:
        sizes = {"max_tokens": 4096, "top_k": 2, "num_experts": 4, "max_slots": 2}
        pairs = PairMetadata(**sizes, device=DEVICE, with_base=with_base)
        steps = (PairTables.of(pairs.buffers, tokens, pairs.sizes) for tokens in (1, 64, 4096))
        return {step.base_height for step in steps}

    assert len(heights(with_base=False)) == 1
    assert len(heights(with_base=True)) > 1


@pytest.mark.parametrize(("top_k", "rank"), [(1, 8), (4, 64)])
def test_a_workspace_holds_the_shrink_output_of_every_batch_up_to_the_largest(
    top_k: int, rank: int
) -> None:
    weights = ExpertWeights(
        num_slots=1,
        num_experts=8,
        slice_widths=(16, 16),
        in_features=4096,
        rank=rank,
        dtype=torch.bfloat16,
        device="meta",
    )
    needed = 0
    for tokens in range(1, 300):
        shape = MoEShape(tokens * top_k, 8, 4096, (16, 16), rank, 2)
        needed = max(needed, math.prod(shrunk_shape(shape)))
        size = MoEWorkspace([weights], max_tokens=tokens, top_k=top_k).shrunk.numel()
        assert needed <= size, tokens


def _compare_tables(scene: _Scene, pairs: PairMetadata, step: int, tokens: int) -> None:
    generator = torch.Generator().manual_seed(100 * step + tokens)
    known = 2 * scene.experts if scene.mapped else scene.experts

    def drawn(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=generator).int()

    # ids that no expert has, on both sides of those that exist
    ids, slots = drawn(-2, known + 2, tokens, scene.top_k), drawn(-1, scene.slots, tokens)
    ids[: scene.experts, 0] = torch.arange(min(tokens, scene.experts)).int()
    table = None
    if scene.mapped:
        # the last expert of the model is one of those that are here
        table = torch.full((known,), _NOTHING, dtype=torch.int32)
        table[1::2] = torch.arange(scene.experts).int()
    batch = BatchMetadata(max_tokens=scene.tokens[0], max_slots=scene.slots, device=DEVICE)
    batch.prepare(slots)
    wanted = _tables(scene, pairs, ids, slots, table)
    # sizes are compared before anything can be written past the end
    assert all(len(values) <= len(getattr(pairs, name)) for name, values in wanted.items())
    pairs.prepare(ids.to(DEVICE), batch, expert_map=None if table is None else table.to(DEVICE))
    for name, values in wanted.items():
        found = getattr(pairs, name).tolist()
        behind = 0 if name.startswith("num") else _NOTHING
        assert found == values + [behind] * (len(found) - len(values)), (step, name)


def _tables(
    scene: _Scene, pairs: PairMetadata, ids: Tensor, slots: Tensor, table: Tensor | None
) -> dict[str, list[int]]:
    """The live part of each table; only -1 follows."""
    experts = [_local(i, scene, table) for i in ids.flatten().tolist()]
    adapters = [
        slots[pair // scene.top_k].item() if expert >= 0 else _NOTHING
        for pair, expert in enumerate(experts)
    ]
    rows = list(enumerate(zip(experts, adapters, strict=True)))
    num_pairs = len(rows)
    height = tile_height(num_pairs, pairs.num_experts)
    base_height = base_tile_height(num_pairs, pairs.num_experts)
    buckets: dict[tuple[int, ...], list[int]] = {}
    bases: dict[tuple[int, ...], list[int]] = {}
    for pair, (expert, slot) in sorted(rows, key=lambda row: (row[1], row[0])):
        if expert >= 0 and slot >= 0:
            buckets.setdefault((expert, int(slot)), []).append(pair)
        if expert >= 0:
            bases.setdefault((expert,), []).append(pair)
    tiles = _cut(buckets, height)
    wanted = {
        "pair_experts": experts,
        "pair_slots": [int(slot) for slot in adapters],
        "tile_experts": [key[0] for key, _ in tiles],
        "tile_slots": [key[1] for key, _ in tiles],
        "tile_pairs": [pair for _, members in tiles for pair in members],
        "num_tiles": [len(tiles)],
    }
    if scene.with_base:
        base_tiles = _cut(bases, base_height)
        wanted["base_experts"] = [key[0] for key, _ in base_tiles]
        wanted["base_pairs"] = [pair for _, members in base_tiles for pair in members]
        wanted["num_base_tiles"] = [len(base_tiles)]
    return wanted


def _cut(
    groups: dict[tuple[int, ...], list[int]], height: int
) -> list[tuple[tuple[int, ...], list[int]]]:
    """Tiles of `height` pairs with their group; -1 in free places."""
    tiles = []
    for key, members in groups.items():
        for start in range(0, len(members), height):
            part = members[start : start + height]
            tiles.append((key, part + [_NOTHING] * (height - len(part))))
    return tiles


def _local(expert: int, scene: _Scene, table: Tensor | None) -> int:
    if table is not None:
        expert = int(table[expert]) if 0 <= expert < len(table) else _NOTHING
    return expert if 0 <= expert < scene.experts else _NOTHING
