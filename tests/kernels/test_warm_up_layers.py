"""Each layer's kernels are listed, in whatever it differs from the others."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from loragate.core.machine import select_interpreter
from loragate.execution.specialisations import HostLaunch, noted_launches

select_interpreter()

from lorakernels.batch.metadata import HEIGHTS, BatchMetadata  # noqa: E402
from lorakernels.common.quantised import Quantised  # noqa: E402
from lorakernels.dense.ops import DenseWorkspace  # noqa: E402
from lorakernels.dense.weights import SlotWeights  # noqa: E402
from lorakernels.layers.embedding import LoRAEmbedding  # noqa: E402
from lorakernels.layers.gdn import DeltaNetHeads, GatedDeltaNetInputProjection  # noqa: E402
from lorakernels.layers.linear import LoRALinear  # noqa: E402
from lorakernels.layers.partition import LoRASharding, Parallel, Slice  # noqa: E402
from lorakernels.layers.warm_up import (  # noqa: E402
    KernelVariant,
    LinearLayer,
    kernel_variants,
    planned_sizes,
)
from lorakernels.layers.wrapped import WrappedLoRALinear  # noqa: E402

SLOTS, K = 2, 48
Kernels = set[tuple[str, Hashable]]


@dataclass(frozen=True)
class Group:
    """Ranks of which one is here; what they exchange may hold anything. `exchanged` are the shapes
    of what this one has given the others."""

    size: int
    rank: int = 0
    exchanged: list[torch.Size] = field(default_factory=list)

    def all_gather(self, part: Tensor, out: Tensor) -> None:
        self.exchanged.append(part.shape)

    def all_reduce(self, tensor: Tensor) -> None:
        self.exchanged.append(tensor.shape)


def buffers(layers: Sequence[LinearLayer], most: int) -> tuple[BatchMetadata, DenseWorkspace]:
    metadata = BatchMetadata(max_tokens=most, max_slots=SLOTS, device="cpu")
    return metadata, DenseWorkspace([layer.slots for layer in layers], max_tokens=most, branches=3)


def kernels(layers: Sequence[LinearLayer], most: int = 40) -> Kernels:
    listed = kernel_variants(layers, *buffers(layers, most))
    return {(variant.kernel, variant.constants) for variant in listed}


def assert_both_are_listed(one: LinearLayer, other: LinearLayer, most: int = 40) -> None:
    """One of them at least needs kernels that the other one does not need."""
    of_one, of_other = kernels([one], most), kernels([other], most)
    assert of_one != of_other
    assert kernels([one, other], most) == kernels([other, one], most) == of_one | of_other


def sharded(width: int, rank: int, group: Group, parallel: Parallel) -> LoRALinear:
    return LoRALinear(
        torch.zeros(width, K, dtype=torch.bfloat16),
        slices=[Slice("q", width)],
        num_slots=SLOTS,
        rank=rank,
        parallel=parallel,
        tp_size=group.size,
        tp_rank=group.rank,
        sharding=LoRASharding.RANK,
        collective=group,
    )


def test_layers_whose_b_alone_has_another_rank_are_both_listed() -> None:
    # each holds 16 ranks of A and 40 columns
    one = sharded(80, 32, Group(2), Parallel.COLUMN)
    other = sharded(160, 64, Group(4), Parallel.COLUMN)
    assert one.slots.a.shape == other.slots.a.shape
    assert one.slots.slice_widths == other.slots.slice_widths
    assert_both_are_listed(one, other)


def test_layers_whose_columns_begin_elsewhere_in_the_output_are_both_listed() -> None:
    # 22 columns each, behind 63 and 64 others of 2 bytes
    one, other = (sharded(n, 16, Group(4, 3), Parallel.ROW) for n in (85, 86))
    assert one.slots.b.shape == other.slots.b.shape
    assert_both_are_listed(one, other)


def delta_net(*, joins: bool) -> GatedDeltaNetInputProjection:
    modules = DeltaNetHeads(key_heads=2, value_heads=4, key_size=8, value_size=8).grouped()
    qkvz, ba = (
        torch.zeros(sum(module.width for module in part), K, dtype=torch.bfloat16)
        for part in (modules.qkvz, modules.ba)
    )
    scales = torch.ones(len(ba))
    return GatedDeltaNetInputProjection(
        qkvz,
        ba if joins else Quantised(ba.to(torch.float8_e4m3fn), scales),
        modules=modules,
        num_slots=SLOTS,
        rank=4,
    )


def test_delta_nets_of_which_one_alone_can_join_its_products_are_both_listed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # a large batch of it has no shrink beside its product
    for module in ("lorakernels.layers.warm_up", "lorakernels.gdn.ops"):
        monkeypatch.setattr(f"{module}.dual_stream", lambda device: True)
    joined, apart = delta_net(joins=True), delta_net(joins=False)
    assert (len(joined.weights), len(apart.weights)) == (1, 2)
    assert joined.slots.a.shape == apart.slots.a.shape
    assert_both_are_listed(joined, apart, most=1000)


def around(row_stride: int, slots: SlotWeights | None = None) -> WrappedLoRALinear:
    """A layer of 64 columns around a base whose rows lie so far apart."""
    slots = slots or SlotWeights(
        num_slots=SLOTS,
        slice_widths=[64],
        in_features=K,
        rank=16,
        dtype=torch.bfloat16,
        device="cpu",
    )
    return WrappedLoRALinear(
        lambda rows: rows.new_zeros(len(rows), row_stride)[:, :64],
        slots,
        slices=[Slice("q", 64)],
        in_features=K,
    )


@pytest.mark.parametrize("stride", [72, 65])
def test_layers_whose_bases_lay_out_rows_otherwise_are_both_listed(stride: int) -> None:
    assert_both_are_listed(around(64), around(stride))


@pytest.mark.parametrize("moved", ["a", "b", "ranks", "scales"])
def test_layers_whose_slots_lie_at_other_addresses_are_both_listed(moved: str) -> None:
    usual = around(64)

    def elsewhere(tensor: Tensor) -> Tensor:
        # one element behind an address that is a multiple of 16
        return tensor.new_zeros(tensor.numel() + 1)[1:].view(tensor.shape)

    tensors = usual.slots.tensors._asdict()
    tensors[moved] = elsewhere(tensors[moved])
    other = around(64, SlotWeights.over(**tensors, slice_widths=[64]))
    assert_both_are_listed(usual, other)


def test_embeddings_of_which_one_begins_at_another_id_are_both_listed() -> None:
    # each holds 24 ids, from 0 and from 24 on
    sizes: dict[str, Any] = {"num_slots": SLOTS, "rank": 16}
    first = LoRAEmbedding(torch.zeros(24, 40), **sizes)
    second = LoRAEmbedding(torch.zeros(48, 40), tp_size=2, tp_rank=1, **sizes)
    assert first.slots.a.shape == second.slots.a.shape
    assert_both_are_listed(first, second)


def compiled_for(layer: LinearLayer, x: Tensor, most: int) -> Kernels:
    """What the launches of a step would be compiled for, as the harness sees it; none is made."""
    found: Kernels = set()

    def note(launch: HostLaunch) -> None:
        found.add((launch.kernel, frozenset(launch.compiled_for.items())))

    metadata, workspace = buffers([layer], most)
    with noted_launches(note, lambda launch: None):
        metadata.prepare(torch.zeros(len(x), dtype=torch.int32))
        layer(x, metadata, workspace)
    return {(kernel, kinds) for kernel, kinds in found if kernel != "prepare_kernel"}


def listed_rows(layer: LinearLayer, most: int) -> set[int]:
    return {variant.rows for variant in kernel_variants([layer], *buffers([layer], most))}


def test_a_layer_sharded_by_rank_needs_no_kernel_that_is_not_listed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # the base product takes most of the time, and no kernel of an adapter depends on its values
    monkeypatch.setattr(functional, "linear", lambda x, weight, _: x.new_empty(len(x), len(weight)))
    # its expand reads 128 ranks, and has another plan from 257 rows on; one of 64 ranks, as many as
    # its shrink writes, has not
    most = 520
    layer = sharded(8192, 128, Group(2), Parallel.COLUMN)
    x = torch.zeros(most, K, dtype=torch.bfloat16)
    known: Kernels = set()
    first = listed_rows(layer, most)
    for rows in range(1, most + 1):
        found = compiled_for(layer, x[:rows], most)
        if rows in first:
            known |= found
        assert found <= known, f"a batch of {rows} rows"


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_an_embedding_needs_no_kernel_that_is_not_listed_for_ids_of_either_type(
    dtype: torch.dtype,
) -> None:
    layer = LoRAEmbedding(torch.zeros(24, 40), num_slots=SLOTS, rank=16)
    ids = torch.zeros(7, dtype=dtype)
    lookups = [
        variant.constants
        for variant in kernel_variants([layer], *buffers([layer], 7))
        if variant.kernel == "lora_lookup_kernel"
    ]
    taken = [dict(constants)["ids_ptr"] for constants in lookups]
    assert taken.count(f"{ids.dtype}, aligned") == 1


def test_the_largest_batch_of_an_embedding_has_a_planned_size() -> None:
    layer = LoRAEmbedding(torch.zeros(24, 40), num_slots=SLOTS, rank=16)
    assert listed_rows(layer, 1) == {1}


@pytest.fixture
def no_base_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """The base product of a layer with a weight of its own holds anything, and is no work."""

    class Functions:
        @staticmethod
        def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            return x.new_empty(len(x), len(weight))

    monkeypatch.setattr("lorakernels.layers.linear.F", Functions)


@pytest.mark.parametrize(
    ("width", "ranks"), [pytest.param(4097, 2, id="two ranks"), pytest.param(6145, 3, id="three")]
)
@pytest.mark.usefixtures("no_base_product")
def test_ranks_with_one_column_more_than_others_exchange_as_often(width: int, ranks: int) -> None:
    # a rank that ran other sizes than the others would leave them waiting
    groups = [Group(ranks, rank) for rank in range(ranks)]
    sizes = {}
    for group in groups:
        layer = sharded(width, 16, group, Parallel.ROW)
        sizes[layer.slots.out_features] = planned_sizes(layer.slots, 2000)
        kernel_variants([layer], *buffers([layer], 2000))
    assert sizes.keys() == {2048, 2049}
    # left to itself, neither would run what the other does
    assert set(sizes[2048]) - set(sizes[2049])
    assert set(sizes[2049]) - set(sizes[2048])
    first, *others = (group.exchanged for group in groups)
    assert first
    assert all(exchanged == first for exchanged in others)


@pytest.mark.parametrize(
    ("slices", "rows"),
    [
        pytest.param((Slice("gate", 24), Slice("up", 36)), 1921, id="several slices"),
        pytest.param((Slice("q", 24, padded_width=4096),), 833, id="a padded slice"),
    ],
)
@pytest.mark.usefixtures("no_base_product")
def test_a_rank_that_is_alone_lists_all_its_kernels(slices: tuple[Slice, ...], rows: int) -> None:
    layer = LoRALinear(
        torch.zeros(sum(part.width for part in slices), 256, dtype=torch.bfloat16),
        slices=slices,
        num_slots=SLOTS,
        rank=16,
        parallel=Parallel.COLUMN,
        sharding=LoRASharding.RANK,
        collective=Group(1),
    )
    x = torch.zeros(rows, 256, dtype=torch.bfloat16)
    listed = set().union(*(compiled_for(layer, x[:n], rows) for n in listed_rows(layer, rows)))
    assert compiled_for(layer, x, rows) <= listed


@pytest.mark.parametrize(("held", "width"), [(2048, 4097), (1921, 3841)])
@pytest.mark.usefixtures("no_base_product")
def test_a_rank_lists_all_its_kernels_whether_it_has_a_column_more_or_less(
    held: int, width: int
) -> None:
    # where it begins to have a plan that the other rank has for no batch
    most = 1921
    layers = [sharded(width, 16, Group(2, rank), Parallel.ROW) for rank in range(2)]
    (layer,) = (layer for layer in layers if layer.slots.out_features == held)
    x = torch.zeros(most, K // 2, dtype=torch.bfloat16)

    def needed(sizes: Iterable[int]) -> Kernels:
        return set().union(*(compiled_for(layer, x[:rows], most) for rows in sizes))

    assert needed([most]) <= needed(listed_rows(layer, most))


def test_the_variants_of_each_height_of_tiles_are_those_of_all_heights_together() -> None:
    layer = LoRALinear(torch.zeros(48, 32), slices=(Slice("q", 48),), num_slots=2, rank=4)
    workspace = DenseWorkspace([layer.slots], max_tokens=200)

    def variants(height: int | None) -> tuple[KernelVariant, ...]:
        metadata = BatchMetadata(max_tokens=200, max_slots=2, device="cpu", height=height)
        return kernel_variants([layer], metadata, workspace)

    by_height = {height: variants(height) for height in HEIGHTS}
    assert [{v.rows for v in found} for found in by_height.values()] == [{1}, {65}, {129}, set()]
    assert {v for found in by_height.values() for v in found} == set(variants(None))
