"""An adapter of Inf and NaN changes the rows of its own slot and no others."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from triton.runtime import interpreter

from lorakernels.batch.metadata import BatchMetadata
from lorakernels.layers.gate_up import GateUp
from lorakernels.layers.moe import FusedMoELoRA, MoEScratch
from lorakernels.moe.align.metadata import PairMetadata
from lorakernels.moe.delta.ops import MoEPath, MoEWorkspace, moe_delta
from lorakernels.moe.weights import ExpertFactors, ExpertWeights

pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")

EXPERTS, TOP_K, HIDDEN, INTERMEDIATE, RANK, SLOTS = 2, 2, 24, 20, 5, 5
# slot 1 has an adapter and no rows; every expert gets rows of all other slots
TOKEN_SLOTS = (3, 0, -1, 2, 4, 0, 3, -1)
TOKENS = len(TOKEN_SLOTS)


def randn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def routed(
    token_slots: tuple[int, ...], *, slots: int = SLOTS, with_base: bool
) -> tuple[BatchMetadata, PairMetadata, Tensor]:
    """A batch of an even number of tokens; each of them chooses both experts."""
    tokens = len(token_slots)
    batch = BatchMetadata(max_tokens=tokens, max_slots=slots, device="cpu")
    batch.prepare(torch.tensor(token_slots, dtype=torch.int32))
    pairs = PairMetadata(
        max_tokens=tokens,
        top_k=TOP_K,
        num_experts=EXPERTS,
        max_slots=slots,
        device="cpu",
        with_base=with_base,
    )
    ids = torch.tensor([[0, 1], [1, 0]] * (tokens // 2), dtype=torch.int32)
    return batch, pairs, ids


def spoil(weights: ExpertWeights, slot: int) -> None:
    for factor in (weights.a[slot], weights.b[slot]):
        factor[..., 0] = float("inf")
        factor[..., 1, :] = float("nan")


def assert_only_rows_of(slot: int, spoilt: Tensor, clean: Tensor, slots: Tensor) -> None:
    others = slots != slot
    assert clean.isfinite().all()
    assert torch.equal(spoilt[others], clean[others])
    assert not spoilt[~others].isfinite().any()


@pytest.mark.parametrize("path", MoEPath)
def test_a_bad_adapter_changes_its_own_pairs_of_a_delta(path: MoEPath) -> None:
    batch, pairs, ids = routed(TOKEN_SLOTS, with_base=False)
    pairs.prepare(ids, batch)
    x = randn(TOKENS, HIDDEN, seed=1)
    previous = randn(TOKENS * TOP_K, 2 * INTERMEDIATE, seed=2)
    weights = ExpertWeights(
        num_slots=SLOTS,
        num_experts=EXPERTS,
        slice_widths=(INTERMEDIATE, INTERMEDIATE),
        in_features=HIDDEN,
        rank=RANK,
        dtype=torch.float32,
        device="cpu",
    )
    for slot in range(SLOTS):
        weights.load(slot, factors(slot)[:2])
    workspace = MoEWorkspace([weights], max_tokens=TOKENS, top_k=TOP_K)

    def run() -> Tensor:
        workspace.shrunk.fill_(float("nan"))
        out = previous.clone()
        moe_delta(x, weights, pairs, workspace, out, path=path)
        return out

    clean = run()
    pair_slots = torch.tensor(TOKEN_SLOTS).repeat_interleave(TOP_K)
    for slot in (1, 3):
        spoil(weights, slot)
        assert_only_rows_of(slot, run(), clean, pair_slots)
        weights.load(slot, factors(slot)[:2])


# tiles of 16 pairs, and of 128, whose columns are folded in two halves
@pytest.mark.parametrize("copies", [1, 5])
@pytest.mark.parametrize(
    "projections",
    [("up_proj", "down_proj"), ("gate_proj", "up_proj", "down_proj")],
    ids=["plain", "gated"],
)
def test_a_bad_adapter_changes_its_own_rows_of_a_layer(
    projections: tuple[str, ...], copies: int
) -> None:
    tokens = copies * TOKENS
    layer = FusedMoELoRA(
        randn(EXPERTS, INTERMEDIATE * (len(projections) - 1), HIDDEN, seed=3),
        randn(EXPERTS, HIDDEN, INTERMEDIATE, seed=4),
        gate_up=GateUp.HALVES if len(projections) == 3 else None,
        num_slots=SLOTS,
        rank=RANK,
        projections=projections,
    )
    for slot in range(SLOTS):
        layer.load_adapter(slot, named(projections, slot))
    scratch = MoEScratch([layer], max_tokens=tokens, top_k=TOP_K)
    batch, pairs, ids = routed(TOKEN_SLOTS * copies, with_base=True)
    x, router = randn(tokens, HIDDEN, seed=1), randn(tokens, TOP_K, seed=5).abs() + 0.1

    def run() -> Tensor:
        for buffer in (scratch.buffers.act, scratch.buffers.y, scratch.workspace.shrunk):
            buffer.fill_(float("nan"))
        return layer(x, ids, router, batch, pairs, scratch)

    clean = run()
    token_slots = torch.tensor(TOKEN_SLOTS * copies)
    for slot in (1, 3):
        for weights in (layer.w13_slots, layer.w2_slots):
            spoil(weights, slot)
            assert_only_rows_of(slot, run(), clean, token_slots)
            layer.load_adapter(slot, named(projections, slot))


def test_the_work_of_a_tile_does_not_depend_on_the_numbers_of_its_slots(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    dots = []
    builder, create_dot = interpreter.InterpreterBuilder, interpreter.InterpreterBuilder.create_dot

    def counted(self: object, *operands: object) -> object:
        dots.append(operands)
        return create_dot(self, *operands)

    monkeypatch.setattr(builder, "create_dot", counted)
    counts = []
    for last in (1, 40):
        dots.clear()
        layer = FusedMoELoRA(
            randn(EXPERTS, 2 * INTERMEDIATE, HIDDEN, seed=3),
            randn(EXPERTS, HIDDEN, INTERMEDIATE, seed=4),
            gate_up=GateUp.HALVES,
            num_slots=41,
            rank=RANK,
        )
        batch, pairs, ids = routed((0, last), slots=41, with_base=True)
        scratch = MoEScratch([layer], max_tokens=2, top_k=TOP_K)
        layer(randn(2, HIDDEN, seed=1), ids, torch.ones(2, TOP_K), batch, pairs, scratch)
        counts.append(len(dots))
    assert counts[0] == counts[1] > 0


def factors(slot: int) -> list[ExpertFactors]:
    """Of gate, up and down."""
    sizes = ((HIDDEN, INTERMEDIATE), (HIDDEN, INTERMEDIATE), (INTERMEDIATE, HIDDEN))
    return [
        ExpertFactors(
            randn(EXPERTS, RANK, inputs, seed=10 * slot + index) / inputs**0.5,
            randn(EXPERTS, width, RANK, seed=10 * slot + index + 100),
            0.5 + slot,
        )
        for index, (inputs, width) in enumerate(sizes)
    ]


def named(projections: tuple[str, ...], slot: int) -> dict[str, ExpertFactors]:
    parts = factors(slot)[-len(projections) :]
    return {f"experts.{name}": part for name, part in zip(projections, parts, strict=True)}
