"""The deltas of a MoE layer of vLLM: w13 prepares the pairs of a step, w2 uses them again.

vLLM calls these outside of traced graphs, in its opaque operator of a MoE layer.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lorakernels.common.slice_stacks import PackedFactors, check_constants, whole
from lorakernels.common.stacked_weights import SlotTensors
from lorakernels.moe.align.metadata import PairMetadata
from lorakernels.moe.align.ops import align_step
from lorakernels.moe.align.tables import PairTables
from lorakernels.moe.delta.ops import add_delta


def prepare_pairs(pairs: PairMetadata, topk_ids: Tensor, row_slots: Tensor) -> None:
    """Install the routing of a step, [rows, top_k]. row_slots: that of StepTables."""
    ids = topk_ids.to(torch.int32).contiguous()
    # nothing is noted of this tensor: the mapping is that of the live rows, and this step is padded
    unknown = pairs.num_tiles
    tables = PairTables.of(pairs.buffers, len(ids), pairs.sizes)
    align_step(tables, ids, row_slots, None, batch_rows=unknown, step=pairs.step)


def add_expert_delta(
    y: Tensor,
    x: Tensor,
    a: Sequence[Tensor],
    b: Sequence[Tensor],
    constants: tuple[Tensor, Tensor],
    pairs: PairMetadata,
    *,
    router_weights: Tensor | None,
    add_inputs: bool,
) -> None:
    """y[pair] += w[pair] * (x_row @ A[slot, expert].T) @ B[slot, expert].T in place, for each pair
    of the prepared step that has a slot.

    y [.., out_features], contiguous, has a row for each pair; x one for each row or each pair.
    a, b: the slices of a packed layer in the order in which y has them, which may be the reverse of
    memory's. constants: ranks and scales, at least slots * slices values, the same for all.
    add_inputs: False writes the delta alone. Raises ValueError.
    """
    out = y.view(-1, y.shape[-1])
    factors, is_swapped = factors_of(a, b)
    if not is_swapped:
        _launch(out, x, factors, constants, pairs, router_weights, add_inputs)
        return
    delta = torch.zeros_like(out)
    _launch(delta, x, factors, constants, pairs, router_weights, add_inputs=True)
    delta = delta.roll(-factors.widths[0], dims=1)
    out.add_(delta) if add_inputs else out.copy_(delta)


def factors_of(a: Sequence[Tensor], b: Sequence[Tensor]) -> tuple[PackedFactors, bool]:
    """The buffers behind the slices of a layer, and whether two slices come in the reverse of
    memory's order. Raises ValueError."""
    is_swapped = a[0].storage_offset() > a[-1].storage_offset()
    if is_swapped:
        a, b = a[::-1], b[::-1]
    return whole(a[0], b[0], [part.shape[2] for part in b]), is_swapped


def _launch(
    out: Tensor,
    x: Tensor,
    factors: PackedFactors,
    constants: tuple[Tensor, Tensor],
    pairs: PairMetadata,
    router_weights: Tensor | None,
    add_inputs: bool,
) -> None:
    check_constants(*constants, factors.a)
    add_delta(
        x,
        SlotTensors(factors.a, factors.b, *constants),
        factors.widths,
        pairs.tables,
        pairs.step,
        # a buffer of the server is not on the stream that this may run on
        shrunk=None,
        out=out,
        router_weights=router_weights,
        add_inputs=add_inputs,
        path=None,
    )
