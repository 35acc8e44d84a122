"""Everything that adapters need beside their weights is reserved once, and counted."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from loragate.core.machine import select_interpreter

select_interpreter()

from lorakernels.batch.metadata import BatchMetadata  # noqa: E402
from lorakernels.layers.gate_up import GateUp  # noqa: E402
from lorakernels.layers.gdn import DeltaNetHeads, GatedDeltaNetInputProjection  # noqa: E402
from lorakernels.layers.linear import LoRALinear  # noqa: E402
from lorakernels.layers.moe import FusedMoELoRA  # noqa: E402
from lorakernels.layers.moe_partition import MoERank  # noqa: E402
from lorakernels.layers.partition import Slice  # noqa: E402
from lorakernels.serving.buffers import ServingBuffers  # noqa: E402

K, MOST, TOP_K = 16, 24, 2
CPU_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
HEADS = DeltaNetHeads(key_heads=2, value_heads=2, key_size=2, value_size=2)


def linear(*, out: int = 16, slots: int = 2, rank: int = 4, device: str = "cpu") -> LoRALinear:
    weight = torch.zeros(out, K, device=device)
    return LoRALinear(weight, slices=[Slice("o", out)], num_slots=slots, rank=rank)


def delta_net() -> GatedDeltaNetInputProjection:
    modules = HEADS.grouped()
    widths = [sum(module.width for module in of) for of in (modules.qkvz, modules.ba)]
    weights = [torch.zeros(width, K) for width in widths]
    return GatedDeltaNetInputProjection(*weights, modules=modules, num_slots=2, rank=4)


def experts(  # type: ignore[no-untyped-def]
    *,
    inter: int = 8,
    count: int = 4,
    rank: int = 4,
    dtype: torch.dtype = torch.float32,
    **options: Any,
):
    w13 = torch.zeros(count, 2 * inter, K, dtype=dtype)
    w2 = torch.zeros(count, K, inter, dtype=dtype)
    return FusedMoELoRA(w13, w2, gate_up=GateUp.HALVES, num_slots=2, rank=rank, **options)


def reserve(**layers: nn.Module) -> ServingBuffers:
    return ServingBuffers.reserve(layers, max_tokens=MOST, top_k=TOP_K, branches=2)


def every_layer() -> dict[str, nn.Module]:
    """Layers of all kinds; experts of three sizes."""
    return {
        "q": linear(out=40),
        "o": linear(),
        "in_proj": delta_net(),
        "one": experts(),
        "same": experts(),
        "wide": experts(inter=24),
        "few": experts(count=2),
        "low": experts(dtype=torch.bfloat16),
    }


def tensors_of(value: object, seen: set[int]) -> Iterator[Tensor]:
    """All tensors that can be reached from an object, but not those of layers."""
    if id(value) in seen or isinstance(value, nn.Module):
        return
    seen.add(id(value))
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_of(item, seen)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_of(item, seen)
    elif hasattr(value, "__dict__"):
        yield from tensors_of(vars(value), seen)


def storages(value: object) -> dict[int, int]:
    """Bytes of every distinct storage, by its address."""
    return {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for tensor in tensors_of(value, set())
    }


def test_the_bytes_that_are_reported_are_those_of_all_storages() -> None:
    buffers = reserve(**every_layer())
    assert buffers.num_bytes == sum(storages(buffers).values())
    assert buffers.num_bytes == sum(buffers.sizes.values())
    assert all(size > 0 for size in buffers.sizes.values())
    assert {t.data_ptr() for t in buffers.tensors} == set(storages(buffers))


def test_what_the_allocator_takes_beyond_the_tensors_is_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain = reserve(**every_layer())
    taken = iter([100, 100 + plain.num_bytes + 4096])
    monkeypatch.setattr("lorakernels.serving.buffers.allocated_bytes", lambda device: next(taken))
    rounded = reserve(**every_layer())
    assert rounded.num_bytes == plain.num_bytes + 4096
    assert rounded.sizes == {**plain.sizes, "rounding of the allocator": 4096}


def test_memory_that_others_free_meanwhile_takes_nothing_off_the_report(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain = reserve(**every_layer())
    taken = iter([1 << 40, 0])
    monkeypatch.setattr("lorakernels.serving.buffers.allocated_bytes", lambda device: next(taken))
    assert reserve(**every_layer()).sizes == plain.sizes


def test_layers_of_one_size_share_a_scratch_and_those_of_as_many_experts_their_pairs() -> None:
    layers: dict[str, Any] = every_layer()
    buffers = reserve(**layers)
    scratch = {
        name: buffers.experts(layers[name]) for name in ("one", "same", "wide", "few", "low")
    }
    assert scratch["one"] is scratch["same"] is scratch["few"]
    assert len({id(found) for found in scratch.values()}) == 3
    pairs = {name: buffers.pairs(layers[name]) for name in scratch}
    assert pairs["one"] is pairs["wide"] is pairs["low"]
    assert (pairs["one"].num_experts, pairs["few"].num_experts) == (4, 2)
    assert all(found.with_base and found.top_k == TOP_K for found in pairs.values())


@pytest.mark.parametrize("ranks", [(4, 64), (64, 4)])
def test_layers_that_share_a_scratch_have_one_for_the_largest_of_their_ranks(
    ranks: tuple[int, int],
) -> None:
    first, second = (experts(rank=rank) for rank in ranks)
    shared = reserve(first=first, second=second).experts(first)
    alone = reserve(largest=experts(rank=64))
    (wanted,) = (alone.experts(layer) for layer in alone.layers.values())
    assert [len(part) for part in shared.tensors] == [len(part) for part in wanted.tensors]


def test_a_rank_reserves_for_the_experts_that_it_holds() -> None:
    layer = experts(place=MoERank(ep_size=2))
    assert reserve(experts=layer).pairs(layer).num_experts == 2


def test_a_workspace_has_a_buffer_for_each_branch_and_all_are_counted() -> None:
    layers = {"o": linear()}
    one, three = (
        ServingBuffers.reserve(layers, max_tokens=MOST, branches=count) for count in (1, 3)
    )
    assert three.dense is not None
    assert len(three.dense.buffers) == 3
    added = three.num_bytes - one.num_bytes
    assert added == 2 * one.sizes["shrink output and stored deltas of linear layers"]
    usual = ServingBuffers.reserve(layers, max_tokens=MOST)
    assert usual.num_bytes == one.num_bytes


def test_a_model_without_linear_layers_has_no_dense_workspace() -> None:
    assert reserve(experts=experts()).dense is None


class Allocations(TorchDispatchMode):
    """Bytes of each storage that an operator allocates, those within operators of this package
    and of the interpreter's launches included."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "lorakernels":
            # what a kernel in Python does is seen as well
            with self:
                return func.redispatch(CPU_KEYS, *args, **(kwargs or {}))
        out = func(*args, **(kwargs or {}))
        known = {t.untyped_storage().data_ptr() for t in tree_leaves(args) if isinstance(t, Tensor)}
        for tensor in tree_leaves(out):
            storage = tensor.untyped_storage() if isinstance(tensor, Tensor) else None
            if storage is not None and storage.nbytes() and storage.data_ptr() not in known:
                self.found.append(storage.nbytes())
        return out


@pytest.mark.parametrize("rows", [1, 5, MOST])
def test_a_step_allocates_nothing_but_what_its_base_layers_return(rows: int) -> None:
    layers: dict[str, Any] = {"o": linear(), "in_proj": delta_net(), "experts": experts()}
    buffers = reserve(**layers)
    x, router = torch.ones(rows, K), torch.ones(rows, TOP_K)
    ids = torch.arange(rows * TOP_K, dtype=torch.int32).view(rows, TOP_K) % 4
    buffers.batch.prepare(torch.arange(1, rows + 1, dtype=torch.int32) % 3 - 1)
    for name in ("o", "in_proj"):
        with Allocations() as allocated:
            found = layers[name](x, buffers.batch, buffers.dense)
        out = found if isinstance(found, Tensor) else found[0]
        assert allocated.found == [out.untyped_storage().nbytes()], name
    moe = layers["experts"]
    with Allocations() as allocated:
        out = moe(x, ids, router, buffers.batch, buffers.pairs(moe), buffers.experts(moe))
    assert allocated.found == [out.nbytes]


def test_a_layer_that_was_not_reserved_for_is_refused() -> None:
    buffers, other = reserve(experts=experts()), experts(inter=40)
    message = (
        r"nothing was reserved for this layer, and nothing grows after it: experts of 16 and 40 in "
        r"torch.float32, 4 of them \(reserved: mapping of the batch, scratch of experts of 16 and 8"
    )
    for find in (buffers.experts, buffers.pairs):
        with pytest.raises(ValueError, match=message):
            find(other)


def test_a_step_that_is_larger_than_the_reservation_is_refused_by_its_sizes() -> None:
    layer = experts()
    buffers, larger = reserve(o=linear(), experts=layer), MOST + 1
    slots = torch.zeros(larger, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"token_slots may have 24 rows \(got 25\)"):
        buffers.batch.prepare(slots)
    # a mapping of the caller that is larger meets the other buffers
    batch = BatchMetadata(max_tokens=400, max_slots=2, device="cpu")
    batch.prepare(torch.zeros(400, dtype=torch.int32))
    small = buffers.layers["o"]
    with pytest.raises(ValueError, match=r"workspace must hold \d+ values for a batch"):
        small(torch.zeros(400, K), batch, buffers.dense)
    ids = torch.zeros(400, TOP_K, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"topk_ids may have 24 rows \(got 400\)"):
        buffers.pairs(layer).prepare(ids, batch)


@pytest.mark.parametrize(
    ("layers", "options", "message"),
    [
        ({}, {}, r"layers must name at least one layer \(got none\)"),
        ({"norm": nn.LayerNorm(3)}, {}, r"norm must be a LoRALinear, .* \(got LayerNorm\)"),
        (
            {"a": linear(), "b": linear(slots=5)},
            {},
            r"layers must have one number of slots \(got \[2, 5\]\)",
        ),
        (
            {"a": linear(), "b": linear(device="meta")},
            {},
            r"layers must be on one device \(got cpu, meta\)",
        ),
        ({"moe": experts()}, {}, r"top_k must be given with a FusedMoELoRA \(got None\)"),
        ({"a": linear()}, {"max_tokens": 0}, r"max_tokens must be at least 1 \(got 0\)"),
        ({"a": linear()}, {"branches": 0}, r"branches must be at least 1 \(got 0\)"),
    ],
)
def test_what_cannot_be_reserved_is_refused(
    layers: dict[str, nn.Module], options: dict[str, int], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        ServingBuffers.reserve(layers, **{"max_tokens": MOST, **options})
