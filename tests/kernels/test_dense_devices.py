"""Tables and workspaces of another GPU are refused: a kernel would use their memory without waiting
for what that GPU does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from loragate.core.machine import select_interpreter

select_interpreter()

from lorakernels.batch.metadata import BatchMetadata  # noqa: E402
from lorakernels.dense import embedding, linear, ops, sharded  # noqa: E402
from lorakernels.dense.ops import (  # noqa: E402
    DenseWorkspace,
    expand_from_tiles,
    shrink_in_tiles,
    shrunk_shape,
)
from lorakernels.dense.weights import SlotWeights  # noqa: E402
from lorakernels.gdn import ops as gdn  # noqa: E402
from lorakernels.runtime.collectives import SimulatedRanks, number_of  # noqa: E402

ROWS, K, WIDTH = 3, 16, 16
OTHER = torch.device("meta")


class Operands:
    """Of each operator, called itself: with a tensor without data torch would not call it."""

    def __init__(self) -> None:
        self.weights = SlotWeights(
            num_slots=1,
            slice_widths=(WIDTH,),
            in_features=K,
            rank=4,
            dtype=torch.float32,
            device="cpu",
        )
        batch = BatchMetadata(max_tokens=ROWS, max_slots=1, device="cpu")
        batch.prepare(torch.zeros(ROWS, dtype=torch.int32))
        self.batch = batch
        self.tables = [batch.tile_slots, batch.tile_rows, batch.num_tiles]
        self.buffers = DenseWorkspace([self.weights], max_tokens=ROWS).buffers
        self.x, self.out = torch.ones(ROWS, K), torch.ones(ROWS, WIDTH)
        self.base = torch.ones(WIDTH, K)
        self.ranks = SimulatedRanks(1)

    def move(self, what: str) -> None:
        moved = self.tables if what == "metadata" else self.buffers
        moved[:] = _moved(moved)
        self.batch.tile_rows = self.tables[1]


def _moved(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [tensor.to(OTHER) for tensor in tensors]


def delta(o: Operands) -> None:
    ops._dense_delta(o.x, *o.weights.tensors, [WIDTH], *o.tables, o.buffers, o.out)


def layer(o: Operands) -> None:
    weights = o.weights.tensors
    linear._lora_linear(o.x, o.base, None, *weights, [WIDTH], *o.tables, o.buffers, 0)


def of_delta_net(o: Operands) -> None:
    weights = o.weights.tensors
    gdn._gdn_in_proj(o.x, [o.base], [None], 8, *weights, [WIDTH], *o.tables, o.buffers, 0)


def lookup(o: Operands) -> None:
    ids = torch.zeros(ROWS, dtype=torch.int64)
    embedding._embedding_delta(ids, *o.weights.tensors, *o.tables, o.buffers, o.out, 0)


def of_a_group(o: Operands) -> None:
    # the shrink output is exchanged within the workspace
    o.buffers[:] = [torch.empty(4 * o.buffers[0].numel(), device=o.buffers[0].device)]
    operands = o.x, *o.weights.tensors, [WIDTH], *o.tables, o.buffers, o.out, 0
    group = number_of(o.ranks.rank(0))
    o.ranks.run([lambda: sharded._sharded_delta(*operands, group)])


def shrunk_of(o: Operands) -> Tensor:
    return torch.zeros(shrunk_shape(ROWS, o.weights), device=o.buffers[0].device)


def shrink(o: Operands) -> None:
    shrink_in_tiles(o.x, o.weights, o.batch, shrunk_of(o))


def expand(o: Operands) -> None:
    expand_from_tiles(shrunk_of(o), o.weights, o.batch, o.out)


OPERATIONS = (delta, layer, of_delta_net, lookup, of_a_group, shrink, expand)


@pytest.mark.parametrize("call", OPERATIONS)
@pytest.mark.parametrize("what", ["metadata", "workspace"])
def test_tables_and_workspace_of_another_device_than_the_input_are_refused(
    call: Callable[[Operands], Any], what: str
) -> None:
    operands = Operands()
    operands.move(what)
    with pytest.raises(ValueError, match=rf"^{what} must be on cpu .* \(got meta\)$"):
        call(operands)
    assert (operands.out == 1).all()


@pytest.mark.parametrize("call", OPERATIONS)
def test_tables_and_workspace_of_the_device_of_the_input_are_taken(
    call: Callable[[Operands], Any],
) -> None:
    call(Operands())
