"""What moe_delta refuses, by the name of the operand and with nothing changed."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor

from loragate.core.machine import select_interpreter

select_interpreter()

from lorakernels.batch.metadata import BatchMetadata  # noqa: E402
from lorakernels.moe.align.metadata import PairMetadata  # noqa: E402
from lorakernels.moe.delta.ops import MoEPath, MoEWorkspace, moe_delta  # noqa: E402
from lorakernels.moe.weights import ExpertFactors, ExpertWeights  # noqa: E402

ROWS, TOP_K, EXPERTS, SLOTS, IN, WIDTH, RANK = 3, 2, 2, 2, 8, 6, 2
PAIRS = ROWS * TOP_K
WIDE = torch.ones(PAIRS, IN + WIDTH)


def make_weights(*, experts: int = EXPERTS, slots: int = SLOTS) -> ExpertWeights:
    sizes: dict[str, Any] = {"slice_widths": (WIDTH,), "in_features": IN, "rank": RANK}
    weights = ExpertWeights(
        num_slots=slots, num_experts=experts, dtype=torch.float32, device="cpu", **sizes
    )
    part = ExpertFactors(torch.ones(experts, RANK, IN), torch.ones(experts, WIDTH, RANK), 1.0)
    weights.load(0, [part])
    return weights


def make_pairs() -> PairMetadata:
    batch = BatchMetadata(max_tokens=ROWS, max_slots=SLOTS, device="cpu")
    batch.prepare(torch.zeros(ROWS, dtype=torch.int32))
    pairs = PairMetadata(
        max_tokens=ROWS, top_k=TOP_K, num_experts=EXPERTS, max_slots=SLOTS, device="cpu"
    )
    pairs.prepare(torch.tensor([[0, 1]] * ROWS, dtype=torch.int32), batch)
    return pairs


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.ones(ROWS - 1, IN)}, "x must have 3 rows or one for each of 6 pairs"),
        ({"x": torch.ones(ROWS + 1, IN)}, "x must have 3 rows or one for each of 6 pairs"),
        ({"x": torch.ones(ROWS)}, "x must have two dimensions (got shape [3])"),
        ({"x": torch.ones(ROWS, IN, 1)}, "x must have two dimensions (got shape [3, 8, 1])"),
        ({"x": torch.ones(ROWS, IN + 1)}, "x must have 8 columns (got 9)"),
        ({"x": torch.ones(ROWS, IN).half()}, "x must be torch.float32 like the weights"),
        ({"x": WIDE[:, :IN], "out": WIDE[:, IN - 1 :][:, :WIDTH]}, "out must not overlap x"),
        ({"out": torch.ones(PAIRS - 1, WIDTH)}, "out must be [6, 6] (got [5, 6])"),
        ({"out": torch.ones(PAIRS, WIDTH - 1)}, "out must be [6, 6] (got [6, 5])"),
        ({"out": torch.ones(PAIRS, WIDTH).half()}, "out must be torch.float32 like the weights"),
        ({"weights": make_weights(experts=EXPERTS + 1)}, "weights must have 2 experts (got 3)"),
        ({"weights": make_weights(experts=EXPERTS - 1)}, "weights must have 2 experts (got 1)"),
        ({"weights": make_weights(slots=SLOTS + 1)}, "weights must have 2 slots (got 3)"),
        ({"weights": make_weights(slots=SLOTS - 1)}, "weights must have 2 slots (got 1)"),
        ({"router_weights": torch.ones(ROWS, TOP_K).half()}, "router_weights must be float32"),
        ({"router_weights": torch.ones(ROWS, TOP_K + 1)}, "router_weights must be float32 with 6"),
        ({"router_weights": torch.ones(1, 1)}, "router_weights must be float32 with 6"),
        ({"router_weights": torch.ones(ROWS, 5)[:, :TOP_K]}, "router_weights must be contiguous"),
        ({"router_weights": torch.ones(TOP_K, ROWS).t()}, "router_weights must be contiguous"),
        ({"router_weights": torch.ones(1, 1).expand(ROWS, TOP_K)}, "must be contiguous"),
    ],
)
@pytest.mark.parametrize("path", [MoEPath.TWO_KERNEL, MoEPath.SMALL_BATCH])
def test_wrong_operands_of_a_delta_are_refused_by_name(
    change: dict[str, Any], message: str, path: MoEPath
) -> None:
    operands: dict[str, Any] = {"x": torch.ones(ROWS, IN), "out": torch.ones(PAIRS, WIDTH)}
    operands |= {"weights": make_weights(), "router_weights": torch.ones(ROWS, TOP_K)}
    operands |= change
    out: Tensor = operands["out"]
    before = out.clone()
    workspace = MoEWorkspace([make_weights()], max_tokens=ROWS, top_k=TOP_K)
    with pytest.raises(ValueError, match=re.escape(message)):
        moe_delta(
            operands["x"],
            operands["weights"],
            make_pairs(),
            workspace,
            out,
            router_weights=operands["router_weights"],
            path=path,
        )
    assert torch.equal(out, before)


def test_a_workspace_for_smaller_batches_of_pairs_is_refused() -> None:
    out, weights = torch.zeros(PAIRS, WIDTH), make_weights()
    workspace = MoEWorkspace([weights], max_tokens=ROWS, top_k=TOP_K)
    workspace.shrunk = workspace.shrunk[: PAIRS * RANK - 1]
    with pytest.raises(ValueError, match=r"workspace must hold 12 values .* \(got 11\)"):
        moe_delta(
            torch.ones(ROWS, IN), weights, make_pairs(), workspace, out, path=MoEPath.TWO_KERNEL
        )
    assert not out.any()
