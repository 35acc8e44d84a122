"""No kernel reads or writes outside of its tensors, not even what no result depends on. The cases
of the gate are judged alike; here each tensor lies far from all others, so that an access into
another one of the same launch is seen as well."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from loragate.core.machine import select_interpreter

select_interpreter()

from triton.runtime.interpreter import InterpreterBuilder  # noqa: E402

from lorakernels.batch.metadata import BatchMetadata  # noqa: E402
from lorakernels.common.quantised import Quantised, quantise_rows  # noqa: E402
from lorakernels.dense.ops import DenseWorkspace, dense_delta  # noqa: E402
from lorakernels.dense.weights import LoRAFactors, SlotWeights  # noqa: E402
from lorakernels.layers.gate_up import GateUp  # noqa: E402
from lorakernels.layers.moe import FusedMoELoRA, MoEScratch  # noqa: E402
from lorakernels.moe.align.metadata import PairMetadata  # noqa: E402
from lorakernels.moe.delta.ops import MoEPath, MoEWorkspace, moe_delta  # noqa: E402
from lorakernels.moe.layer import ops as layer_ops  # noqa: E402
from lorakernels.moe.tiles import Alignment, plan_alignment  # noqa: E402
from lorakernels.moe.weights import ExpertFactors, ExpertWeights  # noqa: E402

# elements between two tensors; more than any block has
GUARD = 1 << 16
SLOTS, TOP_K = 3, 2


class Fences:
    """The bytes that kernels may access."""

    def __init__(self) -> None:
        self.ranges: list[tuple[int, int]] = []

    def around(self, tensor: Tensor) -> Tensor:
        """A copy far away from every other tensor."""
        storage = torch.zeros(tensor.numel() + 2 * GUARD, dtype=tensor.dtype)
        inner = storage[GUARD : GUARD + tensor.numel()].view(tensor.shape).copy_(tensor)
        self.ranges.append((inner.data_ptr(), inner.data_ptr() + inner.nbytes))
        return inner

    def around_all(self, owner: Any) -> None:
        for name, value in vars(owner).items():
            if isinstance(value, Tensor):
                setattr(owner, name, self.around(value))

    def check(self, what: str, ptrs: Any, mask: Any) -> None:
        size = max(1, ptrs.get_element_ty().primitive_bitwidth // 8)
        live = np.broadcast_to(mask.data.astype(bool), ptrs.data.shape)
        places = ptrs.data[live].astype(np.int64)
        inside = np.zeros(places.shape, dtype=bool)
        for start, end in self.ranges:
            inside |= (places >= start) & (places + size <= end)
        # before the access: it may end the process
        outside = int((~inside).sum())
        assert not outside, f"{outside} of {inside.size} elements are {what} outside of all tensors"


@pytest.fixture
def fences(monkeypatch: pytest.MonkeyPatch) -> Fences:
    found = Fences()
    load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store

    def watched_load(self: Any, ptrs: Any, mask: Any, *rest: Any) -> Any:
        found.check("read", ptrs, mask)
        return load(self, ptrs, mask, *rest)

    def watched_store(self: Any, ptrs: Any, value: Any, mask: Any, *rest: Any) -> Any:
        found.check("written", ptrs, mask)
        return store(self, ptrs, value, mask, *rest)

    monkeypatch.setattr(InterpreterBuilder, "create_masked_load", watched_load)
    monkeypatch.setattr(InterpreterBuilder, "create_masked_store", watched_store)
    return found


def make_batch(fences: Fences, rows: int) -> BatchMetadata:
    """The last slot has most rows; one slot has none."""
    batch = BatchMetadata(max_tokens=rows, max_slots=SLOTS, device="cpu")
    fences.around_all(batch)
    slots = torch.full((rows,), SLOTS - 1, dtype=torch.int32)
    slots[: rows // 3] = -1
    slots[rows // 3] = 0
    batch.prepare(fences.around(slots))
    return batch


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    ("rows", "in_features", "widths", "rank"),
    [(5, 40, (24, 17), 5), (5, 3, (7,), 20), (9, 300, (33,), 70), (130, 24, (40,), 12)],
)
def test_a_dense_delta_stays_within_its_tensors(
    fences: Fences,
    rows: int,
    in_features: int,
    widths: tuple[int, ...],
    rank: int,
    dtype: torch.dtype,
) -> None:
    weights = SlotWeights(
        num_slots=SLOTS,
        slice_widths=widths,
        in_features=in_features,
        rank=rank,
        dtype=dtype,
        device="cpu",
    )
    for slot, own in ((0, 1), (SLOTS - 1, rank)):
        parts = [
            LoRAFactors(torch.ones(own, in_features), torch.ones(width, own), 1.0)
            for width in widths
        ]
        weights.load(slot, parts)
    workspace = DenseWorkspace([weights], max_tokens=rows)
    for owner in (weights, workspace):
        fences.around_all(owner)
    batch = make_batch(fences, rows)
    x = fences.around(torch.ones(rows, in_features, dtype=dtype))
    out = fences.around(torch.zeros(rows, sum(widths), dtype=dtype))
    dense_delta(x, weights, batch, workspace, out)
    assert out.any()


def make_pairs(fences: Fences, rows: int, experts: int) -> tuple[PairMetadata, Tensor]:
    pairs = PairMetadata(
        max_tokens=rows,
        top_k=TOP_K,
        num_experts=experts,
        max_slots=SLOTS,
        device="cpu",
        with_base=True,
    )
    fences.around_all(pairs)
    # the last expert has most pairs, and some have an unknown one
    ids = torch.full((rows, TOP_K), experts - 1, dtype=torch.int32)
    ids[0], ids[-1, 0] = 0, experts + 7
    return pairs, fences.around(ids)


@pytest.mark.parametrize("path", MoEPath)
@pytest.mark.parametrize(
    ("rows", "in_features", "widths", "rank", "shared"),
    [
        (5, 40, (24, 17), 5, False),
        (4, 3, (7, 7), 20, True),
        (6, 130, (33,), 70, False),
        (12, 24, (24, 24), 12, False),
    ],
)
def test_a_delta_of_pairs_stays_within_its_tensors(
    fences: Fences,
    path: MoEPath,
    rows: int,
    in_features: int,
    widths: tuple[int, ...],
    rank: int,
    shared: bool,
) -> None:
    experts = 2
    weights = ExpertWeights(
        num_slots=SLOTS,
        num_experts=experts,
        slice_widths=widths,
        in_features=in_features,
        rank=rank,
        dtype=torch.bfloat16,
        device="cpu",
        shared_a=shared,
    )
    for slot, own in ((0, 1), (SLOTS - 1, rank)):
        parts = [
            ExpertFactors(torch.ones(1, own, in_features), torch.ones(experts, width, own), 1.0)
            for width in widths
        ]
        weights.load(slot, parts)
    workspace = MoEWorkspace([weights], max_tokens=rows, top_k=TOP_K)
    for owner in (weights, workspace):
        fences.around_all(owner)
    batch = make_batch(fences, rows)
    pairs, ids = make_pairs(fences, rows, experts)
    pairs.prepare(ids, batch)
    x = fences.around(torch.ones(rows, in_features, dtype=torch.bfloat16))
    out = fences.around(torch.zeros(rows * TOP_K, sum(widths), dtype=torch.bfloat16))
    router = fences.around(torch.ones(rows, TOP_K))
    moe_delta(x, weights, pairs, workspace, out, router_weights=router, path=path)
    assert out.any()


@pytest.mark.parametrize(
    ("rows", "experts", "way"),
    [
        (64, 2, Alignment.SORTED_AT_ONCE),
        (384, 2, Alignment.COMPARED),
        (385, 200, Alignment.COMPARED),
        (576, 2, Alignment.COUNTED),
        (577, 2, Alignment.COUNTED),
        (576, 2100, Alignment.SORTED),
    ],
)
def test_tables_of_the_largest_batch_are_made_within_their_tensors(
    fences: Fences, rows: int, experts: int, way: Alignment
) -> None:
    # programs take 4 or 128 pairs each, of which the last one has all or a few
    assert plan_alignment(rows * TOP_K, experts, SLOTS, with_base=True) is way
    batch = make_batch(fences, rows)
    pairs, ids = make_pairs(fences, rows, experts)
    pairs.prepare(ids, batch)
    assert pairs.num_tiles.item() > 0


def of_8_bits(weight: Tensor) -> Quantised:
    rows = quantise_rows(weight.flatten(0, 1))
    return Quantised(rows.values.view(weight.shape), rows.scales.view(weight.shape[:2]))


@pytest.mark.parametrize("quantised", [False, True])
@pytest.mark.parametrize(
    ("rows", "hidden", "inter", "rank"), [(5, 40, 17, 5), (3, 7, 3, 20), (9, 24, 33, 70)]
)
def test_a_moe_layer_stays_within_its_tensors(
    fences: Fences,
    monkeypatch: pytest.MonkeyPatch,
    quantised: bool,
    rows: int,
    hidden: int,
    inter: int,
    rank: int,
) -> None:
    experts, dtype = 2, torch.float32
    whole = (torch.ones(experts, 2 * inter, hidden), torch.ones(experts, hidden, inter))
    w13, w2 = (of_8_bits(w) if quantised else w for w in whole)
    layer = FusedMoELoRA(w13, w2, gate_up=GateUp.HALVES, num_slots=SLOTS, rank=rank, dtype=dtype)
    for slot, own in ((0, 1), (SLOTS - 1, rank)):
        ends = {"gate_proj": (hidden, inter), "up_proj": (hidden, inter)}
        ends |= {"down_proj": (inter, hidden)}
        layer.load_adapter(
            slot,
            {
                f"experts.{name}": ExpertFactors(
                    torch.ones(1, own, inputs), torch.ones(experts, width, own), 0.5
                )
                for name, (inputs, width) in ends.items()
            },
        )
    scratch = MoEScratch([layer], max_tokens=rows, top_k=TOP_K)
    for owner in (layer.w13_slots, layer.w2_slots, scratch.workspace, scratch.buffers):
        fences.around_all(owner)
    for name in ("w13", "w2"):
        getattr(layer, name).data = fences.around(getattr(layer, name).data)
        if quantised:
            setattr(layer, f"{name}_scales", fences.around(getattr(layer, f"{name}_scales")))
    batch = make_batch(fences, rows)
    pairs, ids = make_pairs(fences, rows, experts)
    x = fences.around(torch.ones(rows, hidden))
    given = quantise_rows(x) if quantised else None
    if given is not None:
        given = Quantised(fences.around(given.values), fences.around(given.scales))
    router = fences.around(torch.ones(rows, TOP_K))
    # what the layer itself allocates: the result, and the activations in 8 bits
    monkeypatch.setattr(torch, "empty_like", lambda like: fences.around(torch.zeros(like.shape)))
    monkeypatch.setattr(layer_ops, "quantise_rows", fenced_rows(fences))
    assert layer(x, ids, router, batch, pairs, scratch, quantised_x=given).any()


def fenced_rows(fences: Fences) -> Callable[[Tensor], Quantised]:
    def quantise(x: Tensor) -> Quantised:
        rows = quantise_rows(x)
        return Quantised(fences.around(rows.values), fences.around(rows.scales))

    return quantise
