"""The alignment at the sizes where its launches change: each way to align has the scratch memory
that it needs, and tables are those of a plain sort."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from loragate.core.machine import select_interpreter

select_interpreter()

from lorakernels.batch.metadata import BatchMetadata  # noqa: E402
from lorakernels.moe.align.kernels.count import sum_counts_kernel  # noqa: E402
from lorakernels.moe.align.metadata import PairMetadata  # noqa: E402
from lorakernels.moe.tiles import base_tile_height, tile_height  # noqa: E402
from lorakernels.runtime import tuning  # noqa: E402

GUARD = 4096
MAGIC = 1_234_567


@dataclass(frozen=True, slots=True)
class Limits:
    """The largest step of the tables and what it is near to."""

    what: str
    pairs: int
    experts: int
    slots: int
    with_base: bool = False


# most pairs that are compared, and counters of a program, in these tests
MOST_PAIRS, MOST_BINS = 24, 128
LIMITS = (
    Limits("fewer pairs", MOST_PAIRS - 1, 3, 2),
    Limits("as many pairs", MOST_PAIRS, 3, 2),
    Limits("more pairs", MOST_PAIRS + 1, 3, 2),
    Limits("more pairs with base tiles", MOST_PAIRS + 1, 3, 2, True),
    Limits("many spans with base tiles", 200, 3, 3, True),
    Limits("as many counters", 40, 16, 8),
    Limits("base rows have counters of their own", 40, 16, 8, True),
    # fewer buckets than counters, which are powers of two
    Limits("more counters, but no more buckets", 40, 17, 5),
    Limits("more counters and compared", MOST_PAIRS, 17, 5),
    Limits("an expert more than a power of two, sorted", 40, 32, 8),
    Limits("sorted with base tiles", 70, 64, 9, True),
)


@pytest.mark.parametrize("most_at_once", [0, 512])
@pytest.mark.parametrize("limits", LIMITS, ids=lambda limits: limits.what)
def test_no_way_to_align_writes_past_its_buffers(
    limits: Limits, most_at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    align = replace(
        tuning.DEFAULT.align,
        pairs_at_once=most_at_once,
        compared_pairs=MOST_PAIRS,
        most_bins=MOST_BINS,
        span=16,
    )
    monkeypatch.setattr(tuning, "DEFAULT", replace(tuning.DEFAULT, align=align))
    pairs = PairMetadata(
        max_tokens=limits.pairs,
        top_k=1,
        num_experts=limits.experts,
        max_slots=limits.slots,
        device="cpu",
        with_base=limits.with_base,
    )
    names = [
        name for name, value in vars(pairs).items() if any(value is own for own in pairs.buffers)
    ]
    guards = [guard for name in names for guard in _guards(pairs, name)]
    assert len(names) == len(pairs.buffers)
    generator = torch.Generator().manual_seed(limits.pairs)
    # full and smaller steps
    for rows in (limits.pairs, min(limits.pairs, MOST_PAIRS), 1):
        ids = torch.randint(0, limits.experts, (rows, 1), generator=generator).int()
        slots = torch.randint(-1, limits.slots, (rows,), generator=generator).int()
        batch = BatchMetadata(max_tokens=rows, max_slots=limits.slots, device="cpu")
        batch.prepare(slots)
        pairs.prepare(ids, batch)
        assert all((guard == MAGIC).all() for guard in guards), rows
        order = sorted(zip(ids[:, 0].tolist(), slots.tolist(), range(rows), strict=True))
        tiled = [pair for _, slot, pair in order if slot >= 0]
        assert pairs.tile_pairs[pairs.tile_pairs >= 0].tolist() == tiled
        if limits.with_base:
            assert pairs.base_pairs[pairs.base_pairs >= 0].tolist() == [pair for *_, pair in order]


# the largest step has tiles of 64 pairs, and some smaller ones have lower tiles
@pytest.mark.parametrize(("tokens", "top_k", "experts"), [(17, 8, 8), (25, 6, 9)])
def test_no_step_begins_more_tiles_than_its_tables_have(
    tokens: int, top_k: int, experts: int
) -> None:
    sizes = {"max_tokens": tokens, "top_k": top_k, "num_experts": experts, "max_slots": 1}
    pairs = PairMetadata(**sizes, device="cpu", with_base=True)
    names = ("tile_slots", "tile_experts", "tile_pairs", "base_experts", "base_pairs")
    guards = [guard for name in names for guard in _guards(pairs, name)]
    batch = BatchMetadata(max_tokens=tokens, max_slots=1, device="cpu")
    for rows in range(2, tokens + 1):
        number = rows * top_k
        for height in (tile_height(number, experts), base_tile_height(number, experts)):
            # each expert has one pair more than full tiles hold
            chosen = [*range(experts), *(e for e in range(experts) for _ in range(height))] * 2
            ids = torch.tensor(chosen[:number], dtype=torch.int32).view(rows, top_k)
            batch.prepare(torch.zeros(rows, dtype=torch.int32))
            pairs.prepare(ids, batch)
            assert all((guard == MAGIC).all() for guard in guards), (rows, height)
            assert int(pairs.num_base_tiles) <= len(pairs.base_experts)
            for table in (pairs.tile_pairs, pairs.base_pairs):
                assert sorted(table[table >= 0].tolist()) == list(range(number))


def _guards(pairs: PairMetadata, name: str) -> tuple[Tensor, Tensor]:
    """Moves a buffer between two guards."""
    table = getattr(pairs, name)
    storage = torch.full((table.numel() + 2 * GUARD,), MAGIC, dtype=torch.int32)
    setattr(pairs, name, storage[GUARD : GUARD + table.numel()].copy_(table))
    return storage[:GUARD], storage[-GUARD:]


@pytest.mark.parametrize("spans", [1, 255, 256, 257, 700])
def test_counts_of_any_number_of_spans_are_added_up(spans: int) -> None:
    counts = torch.randint(0, 9, (spans, 32), generator=torch.Generator().manual_seed(spans)).int()
    found = torch.cat([counts, torch.full((1, 32), -1, dtype=torch.int32)])
    sum_counts_kernel[(2,)](found, spans, NUM_BINS=32, BINS=16, PDL=False)
    sums = counts.cumsum(0)
    assert torch.equal(found[:spans], (sums - counts).int())
    assert torch.equal(found[spans], sums[-1].int())
