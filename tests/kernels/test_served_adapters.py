"""Adapters that come and go between the steps of a small model, against merged weights in fp64."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from loragate.core.machine import select_interpreter

select_interpreter()

from lorakernels.adapters.adapter import Adapter  # noqa: E402
from lorakernels.adapters.slots import AdapterSlots  # noqa: E402
from lorakernels.batch.metadata import BatchMetadata  # noqa: E402
from lorakernels.dense.ops import DenseWorkspace  # noqa: E402
from lorakernels.dense.weights import LoRAFactors  # noqa: E402
from lorakernels.layers.linear import LoRALinear  # noqa: E402
from lorakernels.layers.partition import Parallel, Slice  # noqa: E402

IN, SLOTS, RANK, ROWS = 6, 2, 4, 8
WIDTHS = {"q_proj": 8, "k_proj": 4, "v_proj": 4}
PREFIX = "layers.0."


def randn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def factors(rank: int, width: int, scale: float, seed: int) -> LoRAFactors:
    return LoRAFactors(randn(rank, IN, seed=seed), randn(width, rank, seed=seed + 1), scale)


def adapter(name: str, seed: int) -> Adapter:
    """Ranks and scales differ in each slice."""
    return Adapter(
        name,
        {
            f"{PREFIX}{part}": factors(1 + (seed + i) % RANK, width, 0.5 + seed + i, 100 * seed + i)
            for i, (part, width) in enumerate(WIDTHS.items())
        },
    )


def merged(x: Tensor, given: Adapter | None) -> Tensor:
    """The base layer with the whole delta of an adapter added to its weight."""
    weight = base().double()
    if given is not None:
        parts = [given.modules[f"{PREFIX}{part}"] for part in WIDTHS]
        weight = weight + torch.cat([p.scale * p.b.double() @ p.a.double() for p in parts])
    return x.double() @ weight.T


def base() -> Tensor:
    return randn(sum(WIDTHS.values()), IN, seed=1)


def packed(**options: Any) -> LoRALinear:
    slices = options.pop("slices", [Slice(name, width) for name, width in WIDTHS.items()])
    return LoRALinear(base(), slices=slices, num_slots=SLOTS, rank=RANK, **options)


@dataclass
class Model:
    """One packed layer; metadata and workspace live as long as a server does."""

    layer: LoRALinear = field(default_factory=packed)

    def __post_init__(self) -> None:
        self.slots = AdapterSlots({f"{PREFIX}qkv": self.layer})
        self.batch = BatchMetadata(max_tokens=ROWS, max_slots=SLOTS, device="cpu")
        self.workspace = DenseWorkspace([self.layer.slots], max_tokens=ROWS)

    def serve(self, x: Tensor, *names: str | None) -> Tensor:
        """Row i uses the adapter names[i]."""
        rows = [-1 if name is None else self.slots.slot_of(name) for name in names]
        self.batch.prepare(torch.tensor(rows, dtype=torch.int32))
        return self.layer(x, self.batch, self.workspace)


def assert_served(model: Model, *given: Adapter | None) -> None:
    """One row for each of the adapters; None is a base row."""
    x = randn(len(given), IN, seed=7)
    out = model.serve(x, *(one and one.name for one in given))
    wanted = torch.cat([merged(row[None], one) for row, one in zip(x, given, strict=True)])
    torch.testing.assert_close(out.double(), wanted, rtol=1e-5, atol=1e-4)


def test_an_adapter_that_comes_back_into_another_slot_is_served_from_there() -> None:
    # whatever remembers a result, a mapping or factors by the name of an adapter is now wrong
    model, one, other = Model(), adapter("one", 1), adapter("other", 2)
    assert model.slots.activate(one) == 0
    for _ in range(2):
        assert_served(model, one, None, one)
    model.slots.evict("one")
    assert model.slots.activate(other) == 0
    assert_served(model, other, None, other)
    assert model.slots.activate(one) == 1
    assert_served(model, one, None, other)
    assert_served(model, other, one, None)


def test_slot_0_serves_its_new_adapter_and_nothing_of_the_evicted_one() -> None:
    model, fresh = Model(), Model()
    old, kept, new = adapter("old", 1), adapter("kept", 2), adapter("new", 3)
    model.slots.activate(old)
    model.slots.activate(kept)
    assert_served(model, old, kept, None)
    model.slots.evict("old")
    # rows that still name the empty slot are base rows
    x = randn(2, IN, seed=7)
    model.batch.prepare(torch.tensor([0, -1], dtype=torch.int32))
    out = model.layer(x, model.batch, model.workspace)
    assert torch.equal(out, fresh.serve(x, None, None))
    assert model.slots.activate(new) == 0
    assert_served(model, new, kept, None, new)
    assert fresh.slots.activate(new) == 0
    rows = randn(1, IN, seed=8)
    assert torch.equal(model.serve(rows, "new"), fresh.serve(rows, "new"))


def test_every_slot_and_slice_has_a_rank_and_a_scale_of_its_own() -> None:
    model, pool = Model(), [adapter("one", 1), adapter("other", 2)]
    for slot, given in enumerate(pool):
        assert model.slots.activate(given) == slot
        parts = [given.modules[f"{PREFIX}{part}"] for part in WIDTHS]
        assert model.layer.slots.ranks[slot].tolist() == [part.rank for part in parts]
        assert model.layer.slots.scales[slot].tolist() == [part.scale for part in parts]
    assert len({part.scale for given in pool for part in given.modules.values()}) > len(WIDTHS)
    assert_served(model, pool[1], pool[0], None, pool[1])


def test_an_input_of_three_dimensions_is_served_row_by_row() -> None:
    model, pool = Model(), [adapter("one", 1), adapter("other", 2)]
    for given in pool:
        model.slots.activate(given)
    x = randn(2, 3, IN, seed=5)
    names = ("one", None, "other", "other", "one", None)
    out = model.serve(x, *names)
    assert out.shape == (2, 3, sum(WIDTHS.values()))
    assert torch.equal(out.flatten(0, 1), model.serve(x.flatten(0, 1), *names))
    assert not torch.equal(out[0], out[1])


@pytest.mark.parametrize("tp", [2, 4])
def test_ranks_beyond_the_number_of_heads_share_a_head_with_their_neighbours(tp: int) -> None:
    # 4 query heads of 2 columns; k and v have one head, which every rank holds
    slices = [Slice("q_proj", 8, heads=4), Slice("k_proj", 4, heads=1), Slice("v_proj", 4, heads=1)]
    given, x = adapter("one", 1), randn(3, IN, seed=5)
    q, k, v = merged(x, given).split([8, 4, 4], dim=1)
    for rank in range(tp):
        options = {"parallel": Parallel.COLUMN, "tp_size": tp, "tp_rank": rank}
        model = Model(packed(slices=slices, **options))
        model.slots.activate(given)
        own = q.chunk(tp, dim=1)[rank]
        out = model.serve(x, "one", "one", "one")
        torch.testing.assert_close(out.double(), torch.cat([own, k, v], 1), rtol=1e-5, atol=1e-4)


def test_of_two_heads_over_four_ranks_each_is_held_by_two_neighbours() -> None:
    slices = [Slice("q_proj", 8, heads=4), Slice("k_proj", 4, heads=2), Slice("v_proj", 4, heads=2)]
    given, x = adapter("one", 1), randn(3, IN, seed=5)
    q, k, v = merged(x, given).split([8, 4, 4], dim=1)
    for rank in range(4):
        options = {"parallel": Parallel.COLUMN, "tp_size": 4, "tp_rank": rank}
        model = Model(packed(slices=slices, **options))
        model.slots.activate(given)
        own = [q.chunk(4, dim=1)[rank], k.chunk(2, dim=1)[rank // 2], v.chunk(2, dim=1)[rank // 2]]
        out = model.serve(x, "one", "one", "one")
        torch.testing.assert_close(out.double(), torch.cat(own, 1), rtol=1e-5, atol=1e-4)
