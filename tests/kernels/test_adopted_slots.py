"""Slots in tensors of somebody else, and adapters whose ranks only the device knows."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from loragate.core.machine import detect_machine, select_interpreter

select_interpreter()

from lorakernels.batch.metadata import BatchMetadata  # noqa: E402
from lorakernels.common.stacked_weights import MAX_RANK  # noqa: E402
from lorakernels.dense.ops import DenseWorkspace, dense_delta  # noqa: E402
from lorakernels.dense.stacks import adopt_stacks  # noqa: E402
from lorakernels.dense.weights import LoRAFactors, SlotWeights  # noqa: E402
from lorakernels.moe.weights import ExpertWeights  # noqa: E402

DEVICE = detect_machine().device
K, SLOTS, RANK, WIDTHS = 20, 2, 4, (12, 5)
ROWS = torch.tensor([1, -1, 0, 1], dtype=torch.int32)
NAN = float("nan")


def randn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def fresh() -> SlotWeights:
    return SlotWeights(
        num_slots=SLOTS,
        slice_widths=WIDTHS,
        in_features=K,
        rank=RANK,
        dtype=torch.float32,
        device=DEVICE,
    )


def parts(ranks: Sequence[int], seed: int = 1) -> list[LoRAFactors]:
    return [
        LoRAFactors(randn(r, K, seed=seed + i), randn(n, r, seed=seed + i + 10), 0.5 + i)
        for i, (r, n) in enumerate(zip(ranks, WIDTHS, strict=True))
    ]


def delta(weights: SlotWeights) -> Tensor:
    metadata = BatchMetadata(max_tokens=4, max_slots=SLOTS, device=DEVICE)
    metadata.prepare(ROWS)
    out = torch.zeros(len(ROWS), sum(WIDTHS), device=DEVICE)
    dense_delta(
        randn(len(ROWS), K, seed=7), weights, metadata, DenseWorkspace([weights], max_tokens=4), out
    )
    return out


def state(weights: Any) -> list[Tensor]:
    return [tensor.clone() for tensor in weights.tensors]


def same(left: Sequence[Tensor], right: Sequence[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def test_adapters_that_tensors_hold_when_they_are_adopted_are_resident() -> None:
    first = fresh()
    first.load(1, parts((3, 4)))
    adopted = SlotWeights.over(*state(first), slice_widths=WIDTHS)
    assert torch.equal(delta(adopted), delta(first))
    assert delta(adopted).any(dim=1).tolist() == (ROWS == 1).tolist()


def test_adopted_tensors_are_those_that_are_read_and_written() -> None:
    first = fresh()
    adopted = SlotWeights.over(*first.tensors, slice_widths=WIDTHS)
    assert [t.data_ptr() for t in adopted.tensors] == [t.data_ptr() for t in first.tensors]
    adopted.load(0, parts((2, 1)))
    assert first.ranks[0].tolist() == [2, 1]
    first.reset(0)
    assert not delta(adopted).any()


@pytest.mark.parametrize(
    ("field", "change", "message"),
    [
        (0, lambda t: t[0], "a must have four dimensions"),
        (0, lambda t: t[None], "a must have four dimensions"),
        (0, lambda t: t[:, :1], "a must have 2 slices (got 1)"),
        (0, lambda t: torch.cat([t, t], dim=1), "a must have 2 slices (got 4)"),
        (0, lambda t: t.mT.contiguous().mT, "a must be contiguous"),
        (0, lambda t: t.to(torch.float64), "dtype must be float16, bfloat16 or float32"),
        (1, lambda t: t[:, 1:], "b must be [2, 17, 4] (got [2, 16, 4])"),
        (1, lambda t: t[:1], "b must be [2, 17, 4] (got [1, 17, 4])"),
        (1, lambda t: t.half(), "b must be torch.float32 (got torch.float16)"),
        (2, lambda t: t.long(), "ranks must be torch.int32 (got torch.int64)"),
        (2, lambda t: t[0], "ranks must be [2, 2] (got [2])"),
        (3, lambda t: t.half(), "scales must be torch.float32 (got torch.float16)"),
        (3, lambda t: t.T, "scales must be contiguous"),
        (3, lambda t: t.to("meta"), "(got meta)"),
    ],
)
def test_tensors_that_kernels_cannot_read_are_refused(
    field: int, change: Any, message: str
) -> None:
    tensors = list(fresh().tensors)
    tensors[field] = change(tensors[field])
    with pytest.raises(ValueError, match=re.escape(message)):
        SlotWeights.over(*tensors, slice_widths=WIDTHS)


def test_a_layer_may_have_more_inputs_than_adapters_may_have_ranks() -> None:
    tensors = list(fresh().tensors)
    a = tensors[0]
    tensors[0] = a.new_zeros(*a.shape[:-1], MAX_RANK + 1)
    assert SlotWeights.over(*tensors, slice_widths=WIDTHS).in_features == MAX_RANK + 1
    tensors[0] = a.new_zeros(*a.shape[:-2], MAX_RANK + 1, 3)
    with pytest.raises(ValueError, match=rf"rank must be 1 to {MAX_RANK} \(got {MAX_RANK + 1}\)"):
        SlotWeights.over(*tensors, slice_widths=WIDTHS)


def stacks() -> tuple[list[Tensor], list[Tensor]]:
    a = [randn(SLOTS, 1, RANK, K, seed=i) for i in range(len(WIDTHS))]
    b = [randn(SLOTS, 1, n, RANK, seed=10 + i) for i, n in enumerate(WIDTHS)]
    return a, b


def delta_of_stacks(a: Sequence[Tensor], b: Sequence[Tensor]) -> Tensor:
    x = randn(len(ROWS), K, seed=7).double()
    out = torch.zeros(len(ROWS), sum(WIDTHS), dtype=torch.float64, device=DEVICE)
    for row, slot in enumerate(ROWS.tolist()):
        if slot >= 0:
            pairs = zip(a, b, strict=True)
            columns = [(x[row] @ p[slot, 0].double().T) @ q[slot, 0].double().T for p, q in pairs]
            out[row] = torch.cat(columns)
    return out


def test_stacks_of_another_server_are_served_with_what_they_hold() -> None:
    a, b = stacks()
    out = delta(adopt_stacks(a, b).weights)
    torch.testing.assert_close(out.double(), delta_of_stacks(a, b), rtol=1e-5, atol=1e-4)


def in_one_allocation(parts: Sequence[Tensor]) -> list[Tensor]:
    """One behind the other, as a server may allocate them."""
    block = torch.cat([part.flatten() for part in parts])
    pieces = torch.split(block, [part.numel() for part in parts])
    return [piece.view(part.shape) for piece, part in zip(pieces, parts, strict=True)]


def test_stacks_that_share_an_allocation_are_served_with_what_they_hold() -> None:
    a, b = map(in_one_allocation, stacks())
    assert len({part.untyped_storage().data_ptr() for part in a}) == 1 < len(a)
    out = delta(adopt_stacks(a, b).weights)
    torch.testing.assert_close(out.double(), delta_of_stacks(a, b), rtol=1e-5, atol=1e-4)


def test_stacks_that_are_adopted_in_inference_mode_are_loaded_outside_of_it() -> None:
    a, b = stacks()
    with torch.inference_mode():
        weights = adopt_stacks(a, b).weights
    wanted = adopt_stacks(a, b).weights
    for slots in (weights, wanted):
        slots.load(0, parts((3, 4)))
    assert same(state(weights), state(wanted))


def test_the_server_goes_on_loading_through_its_views() -> None:
    a, b = stacks()
    adopted = adopt_stacks(a, b)
    assert [view.shape for view in (*adopted.a, *adopted.b)] == [s.shape for s in (*a, *b)]
    for view in (*adopted.a, *adopted.b):
        view[1] = view[1].flip(-1)
    wanted = delta_of_stacks(adopted.a, adopted.b)
    torch.testing.assert_close(delta(adopted.weights).double(), wanted, rtol=1e-5, atol=1e-4)
    assert not torch.allclose(wanted, delta_of_stacks(a, b))


def test_what_the_server_loads_into_slots_that_were_adopted_empty_is_served_whole() -> None:
    a, b = stacks()
    adopted = adopt_stacks([torch.zeros_like(x) for x in a], [torch.zeros_like(x) for x in b])
    for view, stack in zip((*adopted.a, *adopted.b), (*a, *b), strict=True):
        view.copy_(stack)
    wanted = delta_of_stacks(a, b)
    torch.testing.assert_close(delta(adopted.weights).double(), wanted, rtol=1e-5, atol=1e-4)


def test_a_layer_of_one_slice_is_adopted_where_it_lies() -> None:
    a, b = stacks()
    adopted = adopt_stacks(a[:1], b[:1])
    assert adopted.weights.a.data_ptr() == a[0].data_ptr()
    assert adopted.weights.b.data_ptr() == b[0].data_ptr()
    assert adopted.a[0] is a[0]


@pytest.mark.parametrize("apart", [(0,), (1,), (0, 1)], ids=["a", "b", "both"])
def test_a_stack_that_does_not_lie_as_packed_is_copied_whichever_it_is(
    apart: tuple[int, ...],
) -> None:
    given = [stacks()[0][0], stacks()[1][0]]
    for index in apart:
        given[index] = given[index].mT.contiguous().mT
    adopted = adopt_stacks(given[:1], given[1:])
    tensors = adopted.weights.tensors
    assert torch.equal(tensors.a[:, 0], given[0][:, 0])
    assert torch.equal(tensors.b, given[1][:, 0])


def test_a_slot_that_is_loaded_here_is_loaded_in_the_views() -> None:
    adopted = adopt_stacks(*stacks())
    new = parts((3, 2))
    adopted.weights.load(0, new)
    for part, a, b in zip(new, adopted.a, adopted.b, strict=True):
        assert torch.equal(a[0, 0, : part.rank], part.a)
        assert torch.equal(b[0, 0, :, : part.rank], part.b)
    assert adopted.weights.ranks.tolist() == [[3, 2], [RANK, RANK]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a, b: ([], []), "a and b must have a stack for each slice (got 0 and 0)"),
        (lambda a, b: (a, b[:1]), "(got 2 and 1)"),
        (lambda a, b: (a[:1], b), "(got 1 and 2)"),
        (lambda a, b: ([a[0][0], a[1]], b), "a must be [slots, 1, .., ..] (got [1, 4, 20])"),
        (
            lambda a, b: (a, [b[0], b[1][None]]),
            "b must be [slots, 1, .., ..] (got [1, 2, 1, 5, 4])",
        ),
        (lambda a, b: ([a[0], a[1][..., 1:]], b), "a of slice 1 must be [2, 1, 4, 20]"),
        (lambda a, b: (a, [b[0], b[1][:1]]), "b of slice 1 must be [2, 1, 5, 4]"),
        (lambda a, b: (a, [b[0].half(), b[1]]), "b of slice 0 must be torch.float32"),
        (lambda a, b: (a, [b[0].expand(2, 3, -1, -1), b[1]]), "b of slice 0 must be [2, 1, 12, 4]"),
    ],
)
def test_stacks_that_do_not_belong_together_are_refused(change: Any, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        adopt_stacks(*change(*stacks()))


def padded(
    ranks: Sequence[int], most: int, dead: float = NAN
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The factors of `parts` as `load_padded` takes them."""
    a = torch.full((len(WIDTHS), most, K), dead, device=DEVICE)
    b = torch.full((sum(WIDTHS), most), dead, device=DEVICE)
    start = 0
    for index, part in enumerate(parts([max(1, min(r, most)) for r in ranks])):
        live = max(0, min(ranks[index], most))
        a[index, :live] = part.a[:live]
        b[start : start + WIDTHS[index], :live] = part.b[:, :live]
        start += WIDTHS[index]
    return (
        a,
        b,
        torch.tensor(ranks, dtype=torch.int32, device=DEVICE),
        torch.tensor([0.5 + i for i in range(len(WIDTHS))], device=DEVICE),
    )


@pytest.mark.parametrize("most", [3, RANK])
def test_ranks_on_the_device_load_what_ranks_on_the_host_load(most: int) -> None:
    host, device = fresh(), fresh()
    device.load(1, parts((RANK, RANK), seed=50))
    host.load(1, parts((2, 3)))
    device.load_padded(1, *padded((2, 3), most))
    assert same(state(host), state(device))


def test_a_rank_of_zero_on_the_device_leaves_a_slice_without_adapter() -> None:
    host, device = fresh(), fresh()
    host.load(0, [parts((2, 1))[0], None])
    device.load_padded(0, *padded((2, 0), RANK))
    assert same(state(host), state(device))
    device.load_padded(0, *padded((2, -3), RANK))
    assert same(state(host), state(device))


def test_a_rank_beyond_the_factors_counts_as_theirs() -> None:
    host, device = fresh(), fresh()
    host.load(0, parts((3, 3)))
    device.load_padded(0, *padded((3, 1000), 3))
    assert same(state(host), state(device))


def test_a_slot_can_be_copied_from_another_one_of_the_same_buffers() -> None:
    weights = fresh()
    weights.load(0, parts((2, 4)))
    weights.load_padded(1, *(tensor[0] for tensor in weights.tensors))
    assert all(torch.equal(tensor[0], tensor[1]) for tensor in weights.tensors)
    before = state(weights)
    weights.load_padded(1, *(tensor[1] for tensor in weights.tensors))
    assert same(state(weights), before)


def test_experts_are_loaded_with_ranks_on_the_device() -> None:
    def experts(shared: bool) -> ExpertWeights:
        return ExpertWeights(
            num_slots=1,
            num_experts=3,
            slice_widths=WIDTHS,
            in_features=K,
            rank=RANK,
            dtype=torch.float32,
            device=DEVICE,
            shared_a=shared,
        )

    for shared in (False, True):
        weights = experts(shared)
        copies = 1 if shared else 3
        a = randn(copies, len(WIDTHS), RANK, K, seed=1)
        b = randn(3, sum(WIDTHS), RANK, seed=2)
        a[:, 1, 2:], b[:, WIDTHS[0] :, 2:] = NAN, NAN
        ranks = torch.tensor([RANK, 2], dtype=torch.int32, device=DEVICE)
        weights.load_padded(0, a, b, ranks, torch.ones(2, device=DEVICE))
        assert torch.equal(weights.a[0], a.nan_to_num(0))
        assert torch.equal(weights.b[0], b.nan_to_num(0))
        assert weights.ranks[0].tolist() == [RANK, 2]


class NoReads(TorchDispatchMode):
    """Refuses every operator whose result depends on values that the host would wait for."""

    READS = ("_local_scalar_dense", "nonzero", "is_nonzero", "equal", "unique", "repeat_interleave")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        assert name not in self.READS, f"{name} waits for the device"
        return func(*args, **(kwargs or {}))


def test_loading_ranks_from_the_device_waits_for_nothing() -> None:
    weights, operands = fresh(), padded((2, 3), RANK)
    with NoReads():
        weights.load_padded(0, *operands)
    assert weights.ranks[0].tolist() == [2, 3]


@pytest.mark.parametrize(
    ("slot", "field", "change", "message"),
    [
        (2, 0, lambda t: t, "slot must be 0 to 1 (got 2)"),
        (0, 0, lambda t: t[:, :0], "a must have 1 to 4 ranks (got 0)"),
        (0, 0, lambda t: torch.cat([t, t], dim=1), "a must have 1 to 4 ranks (got 8)"),
        (0, 0, lambda t: t[..., 1:], "a must be [2, 4, 20] (got [2, 4, 19])"),
        (0, 0, lambda t: t.int(), "a must be floating point (got torch.int32)"),
        (0, 1, lambda t: t[:, 1:], "b must be [17, 4] (got [17, 3])"),
        (0, 1, lambda t: t.to("meta"), "b must be on"),
        (0, 2, lambda t: t.long(), "ranks must be torch.int32 (got torch.int64)"),
        (0, 2, lambda t: t[:1], "ranks must be [2] (got [1])"),
        (0, 3, lambda t: t.half(), "scales must be torch.float32 (got torch.float16)"),
    ],
)
def test_padded_factors_that_do_not_fit_change_nothing(
    slot: int, field: int, change: Any, message: str
) -> None:
    weights, operands = fresh(), list(padded((2, 3), RANK))
    weights.load(0, parts((1, 4)))
    before = state(weights)
    operands[field] = change(operands[field])
    with pytest.raises(ValueError, match=re.escape(message)):
        weights.load_padded(slot, *operands)
    assert same(state(weights), before)
