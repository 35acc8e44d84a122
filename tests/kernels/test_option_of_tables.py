"""Tables are laid out for one value of LORAKERNELS_BATCH_INVARIANT. Under the other one a kernel
would look for tiles of another height, beyond the end of a table: every operator refuses that."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from loragate.core.machine import select_interpreter

select_interpreter()

from tests.kernels.moe_steps import Step as MoEStep  # noqa: E402

from lorakernels.batch.metadata import BatchMetadata  # noqa: E402
from lorakernels.dense.embedding import embedding_delta  # noqa: E402
from lorakernels.dense.ops import (  # noqa: E402
    DenseWorkspace,
    dense_delta,
    expand_from_tiles,
    shrink_in_tiles,
    shrunk_shape,
)
from lorakernels.dense.weights import LoRAFactors, SlotWeights  # noqa: E402
from lorakernels.layers.gdn import DeltaNetHeads, GatedDeltaNetInputProjection  # noqa: E402
from lorakernels.layers.linear import LoRALinear  # noqa: E402
from lorakernels.layers.partition import Slice  # noqa: E402
from lorakernels.moe.align.metadata import PairMetadata  # noqa: E402
from lorakernels.moe.delta.ops import MoEWorkspace, moe_delta  # noqa: E402
from lorakernels.moe.weights import ExpertFactors, ExpertWeights  # noqa: E402
from lorakernels.runtime.options import BATCH_INVARIANT  # noqa: E402

ROWS, WIDTH, RANK = 3, 8, 2
REFUSED = r"LORAKERNELS_BATCH_INVARIANT must be as it was when the tables were made \(got {}\)"
# prepares a step, and returns what runs on it and what that writes
Operation = Callable[[], tuple[Callable[[], object], Tensor]]


def batch() -> BatchMetadata:
    metadata = BatchMetadata(max_tokens=ROWS, max_slots=1, device="cpu")
    metadata.prepare(torch.zeros(ROWS, dtype=torch.int32))
    return metadata


def slots() -> SlotWeights:
    weights = SlotWeights(
        num_slots=1,
        slice_widths=[WIDTH],
        in_features=WIDTH,
        rank=RANK,
        dtype=torch.float32,
        device="cpu",
    )
    weights.load(0, [ones(WIDTH)])
    return weights


def ones(width: int) -> LoRAFactors:
    return LoRAFactors(torch.ones(RANK, WIDTH), torch.ones(width, RANK), 1.0)


def of_dense_delta() -> tuple[Callable[[], object], Tensor]:
    weights, metadata, x, out = slots(), batch(), torch.ones(ROWS, WIDTH), torch.ones(ROWS, WIDTH)
    workspace = DenseWorkspace([weights], max_tokens=ROWS)
    return lambda: dense_delta(x, weights, metadata, workspace, out), out


def of_shrink() -> tuple[Callable[[], object], Tensor]:
    weights, metadata, x = slots(), batch(), torch.ones(ROWS, WIDTH)
    shrunk = torch.zeros(shrunk_shape(ROWS, weights))
    return lambda: shrink_in_tiles(x, weights, metadata, shrunk), shrunk


def of_expand() -> tuple[Callable[[], object], Tensor]:
    weights, metadata, out = slots(), batch(), torch.ones(ROWS, WIDTH)
    shrunk = torch.ones(shrunk_shape(ROWS, weights))
    return lambda: expand_from_tiles(shrunk, weights, metadata, out), out


def of_embedding() -> tuple[Callable[[], object], Tensor]:
    weights, metadata, out = slots(), batch(), torch.ones(ROWS, WIDTH)
    workspace, ids = DenseWorkspace([weights], max_tokens=ROWS), torch.arange(ROWS)
    return lambda: embedding_delta(ids, weights, metadata, workspace, out), out


def of_linear_layer() -> tuple[Callable[[], object], Tensor]:
    layer = LoRALinear(
        torch.ones(WIDTH, WIDTH), None, slices=[Slice("q", WIDTH)], num_slots=1, rank=RANK
    )
    layer.slots.load(0, [ones(WIDTH)])
    metadata, workspace = batch(), DenseWorkspace([layer.slots], max_tokens=ROWS)
    return lambda: layer(torch.ones(ROWS, WIDTH), metadata, workspace), workspace.shrunk


def of_delta_net() -> tuple[Callable[[], object], Tensor]:
    heads = DeltaNetHeads(key_heads=1, value_heads=1, key_size=4, value_size=4)
    layer = GatedDeltaNetInputProjection(
        torch.ones(16, WIDTH), torch.ones(2, WIDTH), modules=heads.grouped(), num_slots=1, rank=RANK
    )
    layer.slots.load(0, [ones(16), None])
    metadata, workspace = batch(), DenseWorkspace([layer.slots], max_tokens=ROWS)
    return lambda: layer(torch.ones(ROWS, WIDTH), metadata, workspace), workspace.shrunk


def routed() -> PairMetadata:
    return PairMetadata(max_tokens=ROWS, top_k=1, num_experts=2, max_slots=1, device="cpu")


def of_alignment() -> tuple[Callable[[], object], Tensor]:
    pairs, metadata = routed(), batch()
    ids = torch.zeros(ROWS, 1, dtype=torch.int32)
    return lambda: torch.ops.lorakernels.align_pairs(
        ids,
        metadata.token_slots,
        None,
        pairs.buffers,
        pairs.sizes,
        metadata.tile_rows,
        pairs.step,
    ), pairs.tile_pairs


def of_expert_delta() -> tuple[Callable[[], object], Tensor]:
    pairs, x, out = routed(), torch.ones(ROWS, WIDTH), torch.ones(ROWS, WIDTH)
    pairs.prepare(torch.zeros(ROWS, 1, dtype=torch.int32), batch())
    weights = ExpertWeights(
        num_slots=1,
        num_experts=2,
        slice_widths=[WIDTH],
        in_features=WIDTH,
        rank=RANK,
        dtype=torch.float32,
        device="cpu",
    )
    weights.load(0, [ExpertFactors(torch.ones(2, RANK, WIDTH), torch.ones(2, WIDTH, RANK), 1.0)])
    workspace = MoEWorkspace([weights], max_tokens=ROWS, top_k=1)
    return lambda: moe_delta(x, weights, pairs, workspace, out), out


def of_expert_layer() -> tuple[Callable[[], object], Tensor]:
    step = MoEStep()
    x = step.prepare(ROWS)
    return lambda: step.run(x), step.pairs.tile_pairs


OPERATIONS: list[Operation] = [
    of_dense_delta,
    of_shrink,
    of_expand,
    of_embedding,
    of_linear_layer,
    of_delta_net,
    of_alignment,
    of_expert_delta,
    of_expert_layer,
]


@pytest.fixture(params=["0", "1"])
def other(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The value that a step is not prepared under."""
    monkeypatch.setenv(BATCH_INVARIANT, "1" if request.param == "0" else "0")
    return str(request.param)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_an_operator_refuses_tables_of_another_value_and_writes_nothing(
    operation: Operation, other: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, written = operation()
    written.zero_()
    with monkeypatch.context() as changed:
        changed.setenv(BATCH_INVARIANT, other)
        with pytest.raises(ValueError, match=REFUSED.format(other)):
            run()
    assert not written.any()
    run()
    assert written.any()
