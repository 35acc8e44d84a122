"""The kernels that linear layers need for any batch are listed and compiled ahead."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from loragate.core.machine import select_interpreter
from loragate.execution.specialisations import HostLaunch, noted_launches

select_interpreter()

from lorakernels.batch.metadata import BatchMetadata  # noqa: E402
from lorakernels.dense.forms import plan_form  # noqa: E402
from lorakernels.dense.ops import DenseWorkspace, shape_of_batch  # noqa: E402
from lorakernels.dense.plan import plan_shrink  # noqa: E402
from lorakernels.dense.weights import LoRAFactors, SlotWeights  # noqa: E402
from lorakernels.gdn.forms import plan_gdn  # noqa: E402
from lorakernels.layers.embedding import LoRAEmbedding  # noqa: E402
from lorakernels.layers.gdn import DeltaNetHeads, GatedDeltaNetInputProjection  # noqa: E402
from lorakernels.layers.linear import LinearAdapters, LoRALinear  # noqa: E402
from lorakernels.layers.partition import LoRASharding, Parallel, Slice  # noqa: E402
from lorakernels.layers.warm_up import (  # noqa: E402
    constants_of,
    kernel_variants,
    planned_sizes,
    warm_up,
)
from lorakernels.layers.wrapped import WrappedLoRALinear  # noqa: E402
from lorakernels.runtime.launching import Launch  # noqa: E402
from lorakernels.runtime.options import DUAL_STREAM  # noqa: E402

MOST = 3200
Compiled = frozenset[tuple[str, Hashable]]


@dataclass(frozen=True)
class Geometry:
    in_features: int
    widths: tuple[int, ...]
    rank: int
    slots: int
    dtype: torch.dtype = torch.bfloat16


# on both sides of what is deep, what is wide, and of the ranks that stay on chip
GEOMETRIES = (
    Geometry(48, (40, 16, 16), 16, 3),
    Geometry(64, (8200, 8200), 16, 4),
    Geometry(8200, (24,), 8, 2),
    Geometry(1000, (520, 72), 24, 6),
    Geometry(96, (64, 32), 96, 4),
    Geometry(72, (80,), 320, 5, torch.float16),
    Geometry(40, (33, 24), 6, 3, torch.float32),
    # the expand of few rows has other columns from 33 rows on, and the shrink has not
    Geometry(64, (8200, 8200), 72, 4),
)
# of so many weights that two products beside each other are faster for few rows, or that the
# product of all columns hides a shrink of more rows
DELTA_NETS = (Geometry(5120, (11000,), 16, 1), Geometry(2048, (8192, 4096, 32, 32), 16, 1))


@dataclass(frozen=True, eq=False)
class Server:
    layer: WrappedLoRALinear
    metadata: BatchMetadata
    workspace: DenseWorkspace
    x: Tensor

    def step(self, rows: int) -> Tensor:
        self.metadata.prepare(torch.zeros(rows, dtype=torch.int32))
        out: Tensor = self.layer(self.x[:rows], self.metadata, self.workspace)
        return out


def slots_of(geometry: Geometry) -> SlotWeights:
    return SlotWeights(
        num_slots=geometry.slots,
        slice_widths=geometry.widths,
        in_features=geometry.in_features,
        rank=geometry.rank,
        dtype=geometry.dtype,
        device="cpu",
    )


@cache
def server(geometry: Geometry, most: int = MOST) -> Server:
    """A layer whose base product is no work."""
    slots = slots_of(geometry)
    width = sum(geometry.widths)
    layer = WrappedLoRALinear(
        lambda rows: rows.new_zeros(len(rows), width),
        slots,
        slices=[Slice(str(i), n) for i, n in enumerate(geometry.widths)],
        in_features=geometry.in_features,
    )
    return Server(
        layer,
        BatchMetadata(max_tokens=most, max_slots=geometry.slots, device="cpu"),
        DenseWorkspace([slots], max_tokens=most),
        torch.ones(most, geometry.in_features, dtype=geometry.dtype),
    )


def compiled_for(own: Server, rows: int) -> Compiled:
    """What the launches of a step would be compiled for, as the harness sees it; none is made."""
    found: set[tuple[str, Hashable]] = set()

    def note(launch: HostLaunch) -> None:
        found.add((launch.kernel, frozenset(launch.compiled_for.items())))

    with noted_launches(note, lambda launch: None):
        own.step(rows)
    return frozenset(found)


@cache
def planned(geometry: Geometry) -> Compiled:
    own = server(geometry)
    sizes = planned_sizes(own.layer.slots, MOST)
    return frozenset().union(*(compiled_for(own, rows) for rows in sizes))


@settings(max_examples=60)
@given(geometry=st.sampled_from(GEOMETRIES), rows=st.integers(1, MOST))
def test_no_batch_needs_a_kernel_that_the_planned_sizes_do_not_need(
    geometry: Geometry, rows: int
) -> None:
    assert compiled_for(server(geometry), rows) <= planned(geometry)


def test_a_way_to_launch_that_the_largest_batch_alone_needs_is_planned() -> None:
    slots = server(GEOMETRIES[0]).layer.slots
    sizes = planned_sizes(slots, MOST)
    assert len(sizes) > 1
    for most in sizes:
        assert planned_sizes(slots, most)[-1] == most


def test_no_batch_beyond_the_largest_one_is_planned() -> None:
    slots = server(GEOMETRIES[0]).layer.slots
    sizes = planned_sizes(slots, MOST)
    for number, beyond in enumerate(sizes[1:], 1):
        assert planned_sizes(slots, beyond - 1) == sizes[:number]


@pytest.mark.parametrize("geometry", [*GEOMETRIES, *DELTA_NETS])
def test_each_form_of_a_layer_and_of_a_delta_net_has_a_planned_size(
    geometry: Geometry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lorakernels.layers.warm_up.dual_stream", lambda device: True)
    slots, most = slots_of(geometry), 270
    sizes = planned_sizes(slots, most)

    def forms(rows: int) -> list[object]:
        shape = shape_of_batch(rows, slots)
        joined, cut = (plan_gdn(shape, dual_stream=True, may_join=joins) for joins in (True, False))
        return [plan_form(shape, dual_stream=True), joined, cut]

    for rows in range(1, most + 1):
        smaller = max(size for size in sizes if size <= rows)
        assert forms(rows) == forms(smaller), f"a batch of {rows} rows"
    assert len({str(forms(rows)) for rows in sizes}) > 1


@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_each_way_to_shrink_beside_a_base_product_has_a_planned_size(geometry: Geometry) -> None:
    slots, most = server(geometry).layer.slots, 200
    sizes = planned_sizes(slots, most)

    def shrink(rows: int) -> object:
        return plan_shrink(replace(shape_of_batch(rows, slots), beside=True))

    for rows in range(1, most + 1):
        known = [shrink(size) for size in sizes if size <= rows]
        assert shrink(rows) in known, f"a batch of {rows} rows"


@pytest.mark.parametrize(("wide", "most"), [(GEOMETRIES[1], 1000), (GEOMETRIES[-1], 140)])
def test_the_smaller_batches_of_a_wide_layer_need_no_other_kernel(
    wide: Geometry, most: int
) -> None:
    for rows in range(1, most):
        assert compiled_for(server(wide), rows) <= planned(wide), f"a batch of {rows} rows"


@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_the_listed_variants_are_those_that_steps_compile(geometry: Geometry) -> None:
    own = server(geometry)
    listed = kernel_variants([own.layer], own.metadata, own.workspace)
    met = [kernel for kernel, _ in planned(geometry) if kernel != "prepare_kernel"]
    assert sorted(variant.kernel for variant in listed) == sorted(met)
    assert len(set(listed)) == len(listed)


def test_a_variant_is_listed_with_the_smallest_batch_that_needs_it() -> None:
    own = server(GEOMETRIES[0])
    rows = {v.rows for v in kernel_variants([own.layer], own.metadata, own.workspace)}
    assert min(rows) == 1
    for first in rows - {1}:
        assert not compiled_for(own, first) <= compiled_for(own, first - 1)


def test_layers_of_one_geometry_are_listed_once() -> None:
    own = server(GEOMETRIES[0])
    alone = kernel_variants([own.layer], own.metadata, own.workspace)
    assert kernel_variants([own.layer, own.layer], own.metadata, own.workspace) == alone


def test_layers_of_several_geometries_are_listed_together() -> None:
    own, other = server(GEOMETRIES[3]), server(GEOMETRIES[4])
    workspace = DenseWorkspace([own.layer.slots, other.layer.slots], max_tokens=MOST)
    # one for both, with as many slots as either has at least
    metadata = BatchMetadata(max_tokens=MOST, max_slots=3, device="cpu")
    alone = [kernel_variants([s.layer], metadata, workspace) for s in (own, other)]
    together = kernel_variants([own.layer, other.layer], metadata, workspace)
    assert set(together) == {*alone[0], *alone[1]}
    assert set(together) > set(alone[0])


def kernels(layers: Sequence[LinearAdapters], most: int = 40) -> set[tuple[str, Hashable]]:
    metadata = BatchMetadata(max_tokens=most, max_slots=2, device="cpu")
    workspace = DenseWorkspace([layer.slots for layer in layers], max_tokens=most, branches=2)
    listed = kernel_variants(layers, metadata, workspace)
    return {(variant.kernel, variant.constants) for variant in listed}


def assert_both_are_listed(one: LinearAdapters, other: LinearAdapters) -> None:
    """One of them at least needs kernels that the other one does not need."""
    of_one, of_other = kernels([one]), kernels([other])
    assert of_one != of_other
    # whichever of them runs first
    assert kernels([one, other]) == kernels([other, one]) == of_one | of_other


COMMON = Geometry(48, (40, 16, 8), 16, 2)


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(replace(COMMON, in_features=52), id="inputs"),
        # as many slices, and as many columns in all
        pytest.param(replace(COMMON, widths=(24, 16, 24)), id="widths"),
        pytest.param(replace(COMMON, widths=(16, 8, 40)), id="order of the widths"),
        pytest.param(replace(COMMON, rank=24), id="rank"),
        # of as many bytes
        pytest.param(replace(COMMON, dtype=torch.float16), id="dtype"),
    ],
)
def test_layers_that_differ_in_one_number_alone_are_both_listed(other: Geometry) -> None:
    assert_both_are_listed(server(COMMON, 40).layer, server(other, 40).layer)


def test_a_linear_layer_of_the_shape_of_an_embedding_is_listed_beside_it() -> None:
    weight, sizes = torch.zeros(48, 40), {"num_slots": 2, "rank": 16}
    embedding = LoRAEmbedding(weight, **sizes)
    linear = LoRALinear(weight.T.contiguous(), slices=[Slice("q", 40)], **sizes)
    assert embedding.slots.a.shape == linear.slots.a.shape
    assert_both_are_listed(embedding, linear)


def test_a_layer_around_a_base_is_listed_beside_one_with_a_weight_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # the latter alone runs its shrink beside the base product
    for module in ("lorakernels.layers.warm_up", "lorakernels.dense.linear"):
        monkeypatch.setattr(f"{module}.dual_stream", lambda device: True)
    around = server(COMMON, 40).layer
    own = LoRALinear(
        torch.zeros(64, 48, dtype=torch.bfloat16),
        slices=around.packing.slices,
        num_slots=2,
        rank=16,
    )
    assert_both_are_listed(around, own)


class FirstOfTwo:
    """The first of two ranks; what it would exchange may hold anything."""

    size, rank = 2, 0

    def all_gather(self, part: Tensor, out: Tensor) -> None:
        pass

    def all_reduce(self, tensor: Tensor) -> None:
        pass


def test_a_layer_that_is_sharded_by_rank_is_listed_beside_one_that_is_not() -> None:
    def layer(rank: int, **options: Any) -> LoRALinear:
        place: dict[str, Any] = {"parallel": Parallel.COLUMN, "tp_size": 2, "tp_rank": 0}
        slices = [Slice("q", 80)]
        return LoRALinear(
            torch.zeros(80, 48), slices=slices, num_slots=2, rank=rank, **place, **options
        )

    sharded = layer(32, sharding=LoRASharding.RANK, collective=FirstOfTwo())
    whole = layer(16)
    assert sharded.slots.a.shape == whole.slots.a.shape
    # the shrink of both is the same kernel
    assert kernels([sharded]) & kernels([whole])
    assert_both_are_listed(sharded, whole)


def test_a_variant_of_several_layers_is_listed_with_the_smallest_batch_of_any(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # alike but for the number of their slots, for which nothing is compiled
    layers = [server(replace(GEOMETRIES[0], slots=slots)).layer for slots in (3, 4, 5)]
    sizes = {3: (5,), 4: (2,), 5: (7,)}
    monkeypatch.setattr(
        "lorakernels.layers.warm_up.planned_sizes", lambda slots, most: sizes[slots.num_slots]
    )
    metadata = BatchMetadata(max_tokens=MOST, max_slots=3, device="cpu")
    workspace = DenseWorkspace([layer.slots for layer in layers], max_tokens=MOST)
    listed = kernel_variants(layers, metadata, workspace)
    assert {(variant.kernel, variant.rows) for variant in listed} == {
        ("lora_shrink_kernel", 2),
        ("lora_expand_kernel", 2),
    }


def test_no_launch_is_made_while_kernels_are_listed() -> None:
    own = server(GEOMETRIES[0])
    made: list[str] = []
    with noted_launches(lambda launch: made.append(launch.kernel), lambda launch: None):
        kernel_variants([own.layer], own.metadata, own.workspace)
    assert set(made) == {"prepare_kernel"}


def test_the_input_of_a_delta_net_is_listed_like_a_linear_layer() -> None:
    modules = DeltaNetHeads(key_heads=2, value_heads=4, key_size=8, value_size=8).grouped()
    widths = [sum(module.width for module in part) for part in (modules.qkvz, modules.ba)]
    layer = GatedDeltaNetInputProjection(
        torch.zeros(widths[0], 32), torch.zeros(widths[1], 32), modules=modules, num_slots=2, rank=4
    )
    metadata = BatchMetadata(max_tokens=200, max_slots=2, device="cpu")
    workspace = DenseWorkspace([layer.slots], max_tokens=200)
    listed = kernel_variants([layer], metadata, workspace)
    assert {variant.kernel for variant in listed} == {"lora_shrink_kernel", "lora_expand_kernel"}
    assert {variant.rows for variant in listed} >= {1, 129}


def test_a_step_after_the_warm_up_is_like_one_without() -> None:
    geometry = Geometry(20, (12, 8), 4, 2, torch.float32)
    outputs = []
    for warms_up in (False, True):
        server.cache_clear()
        own = server(geometry, 40)
        if warms_up:
            assert warm_up([own.layer], own.metadata, own.workspace)
        parts = [LoRAFactors(torch.ones(3, 20), torch.ones(n, 3), 0.5) for n in geometry.widths]
        own.layer.slots.load(0, parts)
        outputs.append(own.step(9))
    assert outputs[0].any()
    assert torch.equal(*outputs)


def run(code: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)


COMPILES = """
from loragate.compile_leg.dry_launch import _Driver, settle_process
settle_process()
import torch
from triton.runtime import driver
driver.set_active(_Driver(90))
from loragate.execution.kernel_compiles import kernels_compiled
from lorakernels.batch import metadata as batch
from lorakernels.dense.ops import DenseWorkspace
from lorakernels.dense.weights import SlotWeights
from lorakernels.layers import warm_up
from lorakernels.layers.partition import Slice
from lorakernels.layers.wrapped import WrappedLoRALinear

class NoLaunch:
    def __getitem__(self, grid):
        return lambda *args, **options: None

# the only kernel that is launched in a warm-up
batch.prepare_kernel = NoLaunch()
slots = SlotWeights(
    num_slots=2, slice_widths=(64,), in_features=64, rank=16, dtype=torch.bfloat16, device="cpu"
)
layer = WrappedLoRALinear(
    lambda rows: rows.new_empty(len(rows), 64), slots, slices=[Slice("q", 64)], in_features=64
)
step = batch.BatchMetadata(max_tokens=130, max_slots=2, device="cpu")
workspace = DenseWorkspace([slots], max_tokens=130)
for _ in range(2):
    names = []
    with kernels_compiled(names):
        warm_up.warm_up([layer], step, workspace)
    print(*sorted(names))
"""


def test_a_warm_up_compiles_each_variant_and_a_second_one_nothing() -> None:
    done = run(COMPILES)
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert first.split() == ["lora_expand_kernel"] * 3 + ["lora_shrink_kernel"] * 3
    assert not second


ON_A_GPU = """
import torch
from loragate.execution.kernel_compiles import kernels_compiled
from lorakernels import BatchMetadata, DenseWorkspace, LoRALinear, Slice, warm_up

weight = torch.randn(12288, 4096, device="cuda", dtype=torch.bfloat16)
layer = LoRALinear(
    weight, slices=[Slice("gate", 6144), Slice("up", 6144)], num_slots=4, rank=16
)
metadata = BatchMetadata(max_tokens=4096, max_slots=4, device="cuda")
workspace = DenseWorkspace([layer.slots], max_tokens=4096)
listed = warm_up([layer], metadata, workspace)
x = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
names = []
with kernels_compiled(names):
    for rows in (*range(1, 300), *range(300, 4097, 37), 4096):
        metadata.prepare(torch.zeros(rows, dtype=torch.int32))
        layer(x[:rows], metadata, workspace)
    torch.cuda.synchronize()
print(len(listed), *names)
"""


@pytest.mark.skipif(not torch.cuda.is_available(), reason="a step compiles nothing without a GPU")
@pytest.mark.parametrize("dual", ["0", "1"])
def test_no_step_compiles_anything_after_a_warm_up(
    dual: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(DUAL_STREAM, dual)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    done = run(ON_A_GPU)
    assert done.returncode == 0, done.stderr
    listed, *compiled = done.stdout.split()
    assert int(listed) > 4
    assert not compiled, f"compiled while serving: {', '.join(compiled)}"


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (1, "1"),
        (24, "i32"),
        (48, "i32 multiple of 16"),
        ((1 << 31) - 1, "i32"),
        (1 << 31, "i64 multiple of 16"),
        ((1 << 31) + 1, "i64"),
        (-(1 << 31), "i32 multiple of 16"),
        (-(1 << 31) - 1, "i64"),
    ],
)
def test_an_integer_is_listed_as_triton_compiles_it(value: int, kind: str) -> None:
    launch = Launch(SimpleNamespace(arg_names=["stride"]), (1,), (value,), {})
    assert constants_of(launch) == (("stride", kind),)
