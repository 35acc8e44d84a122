"""Linear layers whose adapters are sharded by rank, against layers that are not cut at all.
All ranks of a group run in this process."""

from __future__ import annotations

import re
import textwrap
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from loragate.core.machine import select_interpreter

select_interpreter()

import lorakernels  # noqa: E402
from lorakernels.batch.metadata import BatchMetadata, max_tiles  # noqa: E402
from lorakernels.dense import sharded  # noqa: E402
from lorakernels.dense.forms import LinearForm  # noqa: E402
from lorakernels.dense.ops import (  # noqa: E402
    DenseWorkspace,
    dense_delta,
    expand_from_tiles,
    shape_of_batch,
    shrunk_shape,
)
from lorakernels.dense.plan import plan_shrink  # noqa: E402
from lorakernels.dense.rank_shards import RankShardedSlots  # noqa: E402
from lorakernels.dense.weights import SlotWeights  # noqa: E402
from lorakernels.layers.linear import LoRALinear  # noqa: E402
from lorakernels.layers.partition import LoRASharding, Parallel, Slice  # noqa: E402
from lorakernels.layers.sharding import sharded_slots  # noqa: E402
from lorakernels.layers.wrapped import WrappedLoRALinear  # noqa: E402
from lorakernels.runtime.collectives import SimulatedRanks  # noqa: E402
from lorakernels.runtime.options import DUAL_STREAM  # noqa: E402

from .sharded_groups import (  # noqa: E402
    MOST,
    OUT,
    QKV,
    RANK,
    ROWS,
    SLOTS,
    WIDE,
    Group,
    assert_near,
    factors,
    mapping,
    randn,
)

CUTS = pytest.mark.parametrize(
    ("slices", "parallel", "tp"),
    [
        (QKV, Parallel.COLUMN, 1),
        (QKV, Parallel.COLUMN, 2),
        (QKV, Parallel.COLUMN, 4),
        (WIDE, Parallel.COLUMN, 3),
        (OUT, Parallel.ROW, 1),
        (OUT, Parallel.ROW, 2),
        (OUT, Parallel.ROW, 3),
        (OUT, Parallel.ROW, 4),
        # a single column for each rank
        ((Slice("narrow", 3),), Parallel.ROW, 3),
    ],
)


@CUTS
def test_the_ranks_together_are_the_layer_that_is_not_cut(
    slices: Sequence[Slice], parallel: Parallel, tp: int
) -> None:
    Group.of(slices, parallel, tp).check(randn(10, 48, seed=3))


@pytest.mark.parametrize(("slices", "parallel"), [(WIDE, Parallel.COLUMN), (OUT, Parallel.ROW)])
def test_the_partials_of_an_input_that_is_split_are_added_up_before_the_exchange(
    slices: Sequence[Slice], parallel: Parallel
) -> None:
    group = Group.of(slices, parallel, 2, inputs=600)
    assert plan_shrink(shape_of_batch(10, group.ranks[0].slots)).splits > 1
    group.check(randn(10, 600, seed=3))


def test_what_ranks_exchange_lies_in_the_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    group = Group.of(WIDE, Parallel.COLUMN, 2, inputs=600)
    assert plan_shrink(shape_of_batch(10, group.ranks[0].slots)).splits > 1
    workspace, exchanged = group.workspace(), list[Tensor]()
    monkeypatch.setattr(Group, "workspace", lambda group: workspace)
    gather = type(group.simulated.rank(0)).all_gather

    def noted(rank: Any, part: Tensor, out: Tensor) -> None:
        exchanged.extend((part, out))
        gather(rank, part, out)

    monkeypatch.setattr(type(group.simulated.rank(0)), "all_gather", noted)
    group.parts(randn(10, 600, seed=3))
    memory = workspace.shrunk.untyped_storage().data_ptr()
    assert exchanged
    assert {t.untyped_storage().data_ptr() for t in exchanged} == {memory}


@pytest.mark.parametrize(("slices", "parallel"), [(QKV, Parallel.COLUMN), (OUT, Parallel.ROW)])
def test_layers_of_16_bits_differ_by_roundings_alone(
    slices: Sequence[Slice], parallel: Parallel
) -> None:
    group = Group.of(slices, parallel, 4, dtype=torch.bfloat16)
    group.check(randn(10, 48, seed=3).bfloat16())


def test_each_rank_holds_its_part_of_both_factors() -> None:
    # a rank of 10 is rounded up to three parts of four
    column = Group.of(WIDE, Parallel.COLUMN, 3).ranks[1].slots
    assert (column.a.shape, column.b.shape) == ((SLOTS, 2, 4, 48), (SLOTS, 20, 12))
    row = [layer.slots for layer in Group.of(OUT, Parallel.ROW, 3).ranks]
    assert [slots.a.shape for slots in row] == [(SLOTS, 1, RANK, 16)] * 3
    assert [slots.b.shape for slots in row] == [(SLOTS, w, RANK) for w in (12, 12, 13)]


def test_an_adapter_of_fewer_ranks_than_the_group_is_served() -> None:
    # one rank of A is on the first rank, none on the others
    slices = (Slice("gate", 24),)
    group = Group.of(slices, Parallel.COLUMN, 12)
    group.load(0, {"gate": factors(1, 24, 7, 48)})
    assert [bool(layer.slots.a[0].any()) for layer in group.ranks] == [True] + 11 * [False]
    group.check(randn(10, 48, seed=3))


def test_an_adapter_that_is_smaller_than_the_one_before_it_is_alone_in_its_slot() -> None:
    group = Group.of(WIDE, Parallel.COLUMN, 2)
    group.load(0, {"up": factors(2, 36, 7, 48)})
    group.check(randn(10, 48, seed=3))
    for layer in (*group.ranks, group.whole):
        layer.unload(0)
    group.check(randn(10, 48, seed=3))


def test_an_adapter_whose_rank_only_the_device_knows_is_cut_as_well() -> None:
    group, rank = Group.of(WIDE, Parallel.COLUMN, 2), 7
    given = {s.name: factors(rank, s.width, 40 + i, 48) for i, s in enumerate(WIDE)}
    live, scales = torch.tensor([rank, 3], dtype=torch.int32), torch.tensor([0.5, 2.0])
    a = torch.stack([given[s.name].a for s in WIDE])
    for layer in (*group.ranks, group.whole):
        columns = layer.cut.columns
        b = [given[s.name].b[c.start : c.stop] for s, c in zip(WIDE, columns, strict=True)]
        layer.slots.load_padded(2, a, torch.cat(b), live, scales)
    group.check(randn(10, 48, seed=3))


def test_a_workspace_that_is_made_in_inference_mode_serves_an_exchange_outside_of_it() -> None:
    # the partials of a split input are added up in the workspace, too
    group = Group.of(WIDE, Parallel.COLUMN, 2, inputs=600)
    x, prepared = randn(10, 600, seed=3), mapping(ROWS)
    with torch.inference_mode():
        workspace = group.workspace()
    found = group.simulated.run(
        [lambda layer=layer: layer(x, prepared, workspace) for layer in group.ranks]
    )
    assert all(map(torch.equal, found, group.parts(x)))


def test_a_batch_that_is_known_to_have_base_rows_alone_exchanges_nothing() -> None:
    group, x = Group.of(WIDE, Parallel.COLUMN, 2), randn(10, 48, seed=3)
    layer = group.ranks[0]
    # outside of `run` an exchange raises
    out = layer(x, mapping(torch.full((10,), -1, dtype=torch.int32)), group.workspace())
    assert isinstance(layer, LoRALinear)
    assert torch.equal(out, F.linear(x, layer.weight, layer.bias))
    assert layer(x[:0], mapping(ROWS[:0]), group.workspace()).shape == (0, 30)


def around(weight: Tensor, bias: Tensor, **options: Any) -> WrappedLoRALinear:
    place = {key: options[key] for key in ("slices", "parallel", "tp_size", "tp_rank")}
    plain = LoRALinear(weight, bias, num_slots=1, rank=1, **place)
    slots = sharded_slots(
        **place,
        num_slots=options["num_slots"],
        rank=options["rank"],
        in_features=weight.shape[1],
        dtype=weight.dtype,
        device="cpu",
    )
    return WrappedLoRALinear(
        lambda rows: F.linear(rows, plain.weight, plain.bias),
        slots,
        **place,
        in_features=weight.shape[1],
        collective=options["collective"],
    )


@pytest.mark.parametrize(("slices", "parallel"), [(QKV, Parallel.COLUMN), (OUT, Parallel.ROW)])
def test_adapters_around_a_linear_that_exists_are_sharded_as_well(
    slices: Sequence[Slice], parallel: Parallel
) -> None:
    Group.of(slices, parallel, 4, build=around).check(randn(10, 48, seed=3))


@pytest.mark.parametrize(
    ("slices", "parallel", "columns"), [(WIDE, Parallel.COLUMN, 30), (OUT, Parallel.ROW, 37)]
)
# fewer, more, those of both ranks, and no matrix
@pytest.mark.parametrize("shape", [(10, 29), (10, 38), (10, 60), (10,), (10, 30, 1)])
def test_a_base_that_returns_other_columns_than_those_of_its_rank_is_refused(
    slices: Sequence[Slice], parallel: Parallel, columns: int, shape: tuple[int, ...]
) -> None:
    group, x = Group.of(slices, parallel, 2, build=around), randn(10, 48, seed=3)
    for layer in group.ranks:
        assert isinstance(layer, WrappedLoRALinear)
        layer.base = lambda rows: rows.new_zeros(shape)
    message = f"out must be [rows, {columns}] (got {list(shape)})"
    with pytest.raises(ValueError, match=re.escape(message)):
        group.parts(x)


@pytest.mark.parametrize(("slices", "parallel"), [(WIDE, Parallel.COLUMN), (OUT, Parallel.ROW)])
def test_autocast_does_not_change_what_ranks_return(
    slices: Sequence[Slice], parallel: Parallel
) -> None:
    group, x = Group.of(slices, parallel, 2), randn(10, 48, seed=3)
    plain = group.parts(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert all(map(torch.equal, group.parts(x), plain))


def test_a_second_stream_is_left_out_with_one_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    group, x = Group.of(WIDE, Parallel.COLUMN, 2), randn(10, 48, seed=3)
    plain = group.parts(x)
    monkeypatch.setattr(sharded, "dual_stream", lambda device: True)
    sharded.warn_of_one_stream.cache_clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        switched = group.parts(x)
    (warning,) = caught
    assert f"{DUAL_STREAM}=1 has no effect" in str(warning.message)
    assert all(map(torch.equal, switched, plain))
    with pytest.raises(ValueError, match=r"sharded by rank must be SINGLE \(got DUAL\)"):
        group.ranks[0](x, mapping(ROWS), group.workspace(), form=LinearForm.DUAL)


def test_the_workspace_holds_the_exchange_of_every_batch() -> None:
    for tp, inputs in ((2, 48), (4, 6000)):
        slots = sharded_slots(
            num_slots=3,
            slices=WIDE,
            in_features=inputs,
            rank=16,
            dtype=torch.bfloat16,
            device="cpu",
            parallel=Parallel.COLUMN,
            tp_size=tp,
            tp_rank=0,
        )
        held = DenseWorkspace([slots], max_tokens=700).shrunk.numel()
        needed = []
        for rows in range(1, 701):
            shape = shape_of_batch(rows, slots)
            ranks = max_tiles(rows, 3, shape.height) * shape.height * 2 * 16 // tp
            needed.append((plan_shrink(shape).splits + 1 + 2 * tp) * ranks)
        # the delta that layers of other kinds store is counted for every layer
        assert max(needed) + 700 * slots.out_features == held


def test_the_snippet_of_the_page_serves_a_layer() -> None:
    page = Path(__file__).parents[2] / "docs" / "lorakernels.md"
    section = page.read_text(encoding="utf-8").partition("## Adapters sharded by rank")[2]
    lines = section.partition("\n## ")[0].splitlines()
    code = "\n".join(line for line in lines if line.startswith("    "))
    gate_up, rows = (Slice("gate_proj", 24), Slice("up_proj", 24)), ROWS.clamp(max=0)
    adapter = {s.name: factors(5, 24, 7 + i, 48) for i, s in enumerate(gate_up)}
    weight, x = randn(48, 48, seed=1), randn(10, 48, seed=3)
    names: dict[str, Any] = vars(lorakernels) | {"weight": weight, "adapter": adapter, "x": x}
    names |= {name: getattr(lorakernels, name) for name in lorakernels.__all__ if name in code}
    names["metadata"] = BatchMetadata(max_tokens=MOST, max_slots=2, device="cpu")
    names["metadata"].prepare(rows)
    exec(textwrap.dedent(code), names)
    whole = LoRALinear(weight, slices=gate_up, num_slots=2, rank=8)
    whole.load_adapter(0, adapter)
    want = whole(x, names["metadata"], DenseWorkspace([whole.slots], max_tokens=MOST))
    gate, up = zip(*(part.split(12, dim=1) for part in names["parts"]), strict=True)
    assert_near(torch.cat([*gate, *up], dim=1), want)


def layer(**options: Any) -> LoRALinear:
    given: dict[str, Any] = {
        "slices": WIDE,
        "num_slots": 2,
        "rank": 8,
        "parallel": Parallel.COLUMN,
        "tp_size": 2,
        "sharding": LoRASharding.RANK,
        "collective": SimulatedRanks(2).rank(0),
    }
    given |= options
    width = sum(part.width for part in given["slices"])
    return LoRALinear(randn(width, 48, seed=1), **given)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"parallel": Parallel.REPLICATED},
            r"must be column- or row-parallel \(got replicated\)",
        ),
        ({"parallel": Parallel.ROW}, r"sharded by rank must have one slice \(got 2\)"),
        (
            {"parallel": Parallel.ROW, "slices": (Slice("one", 1),)},
            r"slice one must have 2 columns or more \(got 1\)",
        ),
        ({"collective": None}, r"collective must be a group with sharding rank \(got None\)"),
        ({"sharding": LoRASharding.BASE}, "collective must be None with sharding base"),
        (
            {"collective": SimulatedRanks(2).rank(1)},
            r"collective must be rank 0 of 2 like the layer \(got 1 of 2\)",
        ),
        (
            {"rank": 511, "tp_size": 3, "collective": SimulatedRanks(3).rank(0)},
            r"rank must be at most 510 where 3 ranks hold equal parts of it \(got 513,",
        ),
    ],
)
def test_what_cannot_be_sharded_is_refused(options: Mapping[str, Any], message: str) -> None:
    assert layer().slots.rank == 8
    with pytest.raises(ValueError, match=message):
        layer(**options)


def test_slots_of_another_rank_of_the_group_are_refused() -> None:
    group = Group.of(WIDE, Parallel.COLUMN, 2)
    with pytest.raises(ValueError, match=r"ranks 0 to 5 of A and columns from 0 on \(got 5 to 10"):
        WrappedLoRALinear(
            lambda rows: rows,
            group.ranks[1].slots,
            slices=WIDE,
            in_features=48,
            parallel=Parallel.COLUMN,
            tp_size=2,
            collective=group.simulated.rank(0),
        )


def test_slots_for_the_columns_of_another_rank_are_refused() -> None:
    # of a layer whose input is split each rank holds all ranks of A, and its own columns
    group = Group.of(OUT, Parallel.ROW, 2)
    first, second = group.ranks
    assert first.slots.held == second.slots.held
    width = second.slots.first_column
    with pytest.raises(ValueError, match=rf"columns from 0 on \(got .* and {width}\)"):
        WrappedLoRALinear(
            lambda rows: rows,
            second.slots,
            slices=OUT,
            in_features=group.inputs,
            parallel=Parallel.ROW,
            tp_size=2,
            collective=group.simulated.rank(0),
        )


def test_a_delta_without_a_group_refuses_slots_that_are_sharded() -> None:
    group, x = Group.of(WIDE, Parallel.COLUMN, 2), randn(10, 48, seed=3)
    slots, out = group.ranks[0].slots, torch.zeros(10, 30)
    with pytest.raises(ValueError, match=r"must hold all 10 ranks of A.*\(got 5\)"):
        dense_delta(x, slots, mapping(ROWS), group.workspace(), out)
    shrunk = torch.zeros(shrunk_shape(10, slots))
    with pytest.raises(ValueError, match=r"must hold all 10 ranks of A.*\(got 5\)"):
        expand_from_tiles(shrunk, slots, mapping(ROWS), out)


def test_slots_that_are_not_sharded_need_no_group() -> None:
    slots = SlotWeights(
        num_slots=1,
        slice_widths=[12, 18],
        in_features=48,
        rank=4,
        dtype=torch.float32,
        device="cpu",
    )
    with pytest.raises(ValueError, match="collective must be None with sharding base"):
        WrappedLoRALinear(
            lambda rows: rows,
            slots,
            slices=WIDE,
            in_features=48,
            parallel=Parallel.COLUMN,
            tp_size=2,
            collective=SimulatedRanks(2).rank(0),
        )


@pytest.mark.parametrize("autocast", [False, True])
def test_a_traced_layer_finds_its_group_and_returns_the_same_within_autocast(
    fresh_dynamo: None, autocast: bool
) -> None:
    group, x = Group.of(OUT, Parallel.ROW, 1), randn(10, 48, seed=3)
    (alone,) = group.ranks
    alone.join(_Alone())
    prepared, workspace = mapping(ROWS), group.workspace()
    want = alone(x, prepared, workspace)
    traced = torch.compile(alone, backend="aot_eager", fullgraph=True)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        assert torch.equal(traced(x, prepared, workspace), want)


class _Alone:
    """A group of one rank."""

    size, rank = 1, 0

    def all_gather(self, part: Tensor, out: Tensor) -> None:
        out.copy_(part[None])

    def all_reduce(self, tensor: Tensor) -> None:
        pass


def test_slots_in_tensors_of_a_server_cannot_be_sharded() -> None:
    tensors = [torch.zeros(1)] * 4
    with pytest.raises(ValueError, match="sharded by rank cannot be in tensors of a server"):
        RankShardedSlots.over(*tensors, slice_widths=[1])


@pytest.mark.parametrize(("tp_size", "inputs"), [(2, 64), (8, 16)])
def test_sharded_slots_of_a_padded_layer_have_a_part_of_its_padded_inputs(
    tp_size: int, inputs: int
) -> None:
    options: dict[str, Any] = {"slices": OUT, "parallel": Parallel.ROW, "tp_size": tp_size}
    options |= {"in_features": 100, "padded_in_features": 128, "tp_rank": tp_size - 1}
    slots = sharded_slots(**options, num_slots=1, rank=8, dtype=torch.float32, device="cpu")
    assert slots.in_features == inputs
