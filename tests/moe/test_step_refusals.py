"""Steps of a MoE layer whose pairs, batch or operands do not belong together are refused."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from loragate.core.machine import select_interpreter

select_interpreter()

from lorakernels.batch.metadata import BatchMetadata  # noqa: E402
from lorakernels.layers.gate_up import GateUp  # noqa: E402
from lorakernels.layers.moe import FusedMoELoRA, MoEScratch  # noqa: E402
from lorakernels.moe.align.metadata import PairMetadata  # noqa: E402
from lorakernels.moe.align.tables import PairTables  # noqa: E402
from lorakernels.moe.delta.launch import Delta  # noqa: E402
from lorakernels.moe.delta.plan import MoEShape  # noqa: E402

EXPERTS, SLOTS, TOKENS, TOP_K, HIDDEN, INTER = 3, 2, 4, 2, 6, 5
IDS = torch.tensor([[0, 1]] * (TOKENS + 1), dtype=torch.int32)


def make_batch(rows: int = TOKENS, slots: int = SLOTS) -> BatchMetadata:
    batch = BatchMetadata(max_tokens=TOKENS + 1, max_slots=slots, device="cpu")
    batch.prepare(torch.zeros(rows, dtype=torch.int32))
    return batch


def make_pairs(**changes: Any) -> PairMetadata:
    sizes: dict[str, Any] = {"max_tokens": TOKENS, "top_k": TOP_K, "num_experts": EXPERTS}
    sizes |= {"max_slots": SLOTS, "with_base": True}
    return PairMetadata(device="cpu", **(sizes | changes))


def make_layer(hidden: int = HIDDEN, inter: int = INTER, slots: int = SLOTS) -> FusedMoELoRA:
    w13, w2 = torch.ones(EXPERTS, 2 * inter, hidden), torch.ones(EXPERTS, hidden, inter)
    return FusedMoELoRA(w13, w2, gate_up=GateUp.HALVES, num_slots=slots, rank=1)


@pytest.mark.parametrize(
    ("rows", "batch", "message"),
    [
        (TOKENS + 1, make_batch(TOKENS + 1), "topk_ids may have 4 rows (got 5)"),
        (TOKENS - 1, make_batch(), "topk_ids must have 4 rows, as the batch was prepared for"),
        (TOKENS, make_batch(TOKENS - 1), "topk_ids must have 3 rows, as the batch was prepared"),
        (TOKENS, make_batch(slots=SLOTS + 1), "batch must have 2 slots (got 3)"),
        (TOKENS, make_batch(slots=SLOTS - 1), "batch must have 2 slots (got 1)"),
    ],
)
def test_a_routing_that_is_not_of_the_batch_is_refused_and_changes_nothing(
    rows: int, batch: BatchMetadata, message: str
) -> None:
    pairs = make_pairs()
    pairs.prepare(IDS[:TOKENS], make_batch())
    before = [table.clone() for table in pairs.buffers]
    with pytest.raises(ValueError, match=re.escape(message)):
        pairs.prepare(IDS[:rows], batch)
    assert pairs.num_rows == TOKENS
    assert all(map(torch.equal, before, pairs.buffers))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"router": torch.ones(TOKENS, 3)[:, :TOP_K]}, "router_weights must be contiguous"),
        ({"router": torch.ones(TOP_K, TOKENS).t()}, "router_weights must be contiguous"),
        ({"router": torch.ones(TOKENS, TOP_K + 1)}, "router_weights must be [4, 2] (got [4, 3])"),
        ({"pairs": make_pairs(with_base=False)}, "pairs must be made with_base"),
        (
            {"pairs": make_pairs(num_experts=EXPERTS + 1)},
            "adapters of w13 must have 2 slots and 4 experts (got 2 and 3)",
        ),
        ({"layer": make_layer(slots=SLOTS - 1)}, "adapters of w13 must have 2 slots and 3 experts"),
        ({"layer": make_layer(slots=SLOTS + 1)}, "adapters of w13 must have 2 slots and 3 experts"),
    ],
)
def test_operands_of_a_layer_that_do_not_fit_are_refused_by_name(
    changes: dict[str, Any], message: str
) -> None:
    given: dict[str, Any] = {"router": torch.ones(TOKENS, TOP_K), "pairs": make_pairs()}
    given |= {"layer": make_layer()} | changes
    scratch = MoEScratch([make_layer()], max_tokens=TOKENS, top_k=TOP_K)
    step = (torch.ones(TOKENS, HIDDEN), IDS[:TOKENS], given["router"], make_batch())
    with pytest.raises(ValueError, match=re.escape(message)):
        given["layer"](*step, given["pairs"], scratch)


@pytest.mark.parametrize("sizes", [(HIDDEN + 1, INTER), (HIDDEN, INTER + 1)])
def test_layers_of_different_sizes_share_no_scratch(sizes: tuple[int, int]) -> None:
    found = f"(got {HIDDEN} and {INTER}, {sizes[0]} and {sizes[1]})"
    message = f"layers must have one hidden and intermediate size {found}"
    with pytest.raises(ValueError, match=re.escape(message)):
        MoEScratch([make_layer(), make_layer(*sizes)], max_tokens=TOKENS, top_k=TOP_K)


def test_layers_of_different_dtypes_share_no_scratch() -> None:
    layers = [
        FusedMoELoRA(
            torch.zeros(EXPERTS, 2 * INTER, HIDDEN, dtype=dtype),
            torch.zeros(EXPERTS, HIDDEN, INTER, dtype=dtype),
            gate_up=GateUp.HALVES,
            num_slots=2,
            rank=4,
        )
        for dtype in (torch.float32, torch.bfloat16)
    ]
    message = r"layers must have one dtype \(got torch.bfloat16, torch.float32\)"
    with pytest.raises(ValueError, match=message):
        MoEScratch(layers, max_tokens=TOKENS, top_k=TOP_K)


@pytest.mark.parametrize("tokens", [1, 40, 700, 5000])
def test_no_program_looks_for_a_tile_of_pairs_outside_the_tables(tokens: int) -> None:
    sizes: dict[str, Any] = {"top_k": 2, "num_experts": 2, "max_slots": 3}
    pairs = PairMetadata(max_tokens=tokens, device="meta", **sizes)
    for rows in {1, max(1, tokens // 2), tokens}:
        tables = PairTables.of(pairs.buffers, rows, pairs.sizes)
        delta = SimpleNamespace(
            shape=MoEShape(tables.num_pairs, 2, 8, (8,), 1, 2), tables=tables.tables
        )
        capacity = Delta.tile_capacity.fget(delta)  # type: ignore[attr-defined]
        assert 0 < capacity <= pairs.tile_slots.shape[0]
        assert capacity * tables.height <= pairs.tile_pairs.shape[0]
