"""The delta of a linear layer of vLLM, and of its logits, as one operator.

vLLM traces what its linear layers call. So the operator gets tensors and widths alone, and finds
out when it runs how many rows a step has, which tables belong to them, and whether it is captured.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lorakernels.batch.metadata import tile_height
from lorakernels.common.slice_stacks import check_constants, whole
from lorakernels.dense.check import check_apart
from lorakernels.dense.ops import launch_delta
from lorakernels.integrations.vllm.declaration import may_map_more_rows, runs_adapters
from lorakernels.integrations.vllm.launches import Operator
from lorakernels.integrations.vllm.tables import (
    StepTables,
    host_value,
    tables_of_first_rows,
    tables_of_height,
)
from lorakernels.runtime.operators import register_operator
from lorakernels.runtime.prepared import launch_prepared
from lorakernels.runtime.tuning import tuning_of


def add_linear_delta(
    x: Tensor,
    a: Tensor,
    b: Tensor,
    slice_widths: list[int],
    ranks: Tensor,
    scales: Tensor,
    step: StepTables,
    no_lora: Tensor,
    out: Tensor,
    operator: Operator,
) -> None:
    """out[row] += (x[row] @ A[slot].T) @ B[slot].T for each row with a slot, in place.

    x [rows, in_features], out [rows, sum(slice_widths)]. a, b: the first slices of a packed layer.
    ranks, scales: at least slots * slices values, the same for all. step: rows behind those that it
    maps are base rows; where x has fewer rows than it maps, they are the first ones. no_lora: see
    `runs_adapters`. Raises ValueError.
    """
    torch.ops.lorakernels.vllm_linear_delta(
        *(x, a, b, slice_widths, ranks, scales, step.tensors, step.row_slots, step.live),
        *(no_lora, out, operator.value),
    )


@register_operator("vllm_linear_delta", mutates=("out",))
def _linear_delta(
    x: Tensor,
    a: Tensor,
    b: Tensor,
    slice_widths: list[int],
    ranks: Tensor,
    scales: Tensor,
    tables: list[Tensor],
    row_slots: Tensor,
    live: Tensor,
    no_lora: Tensor,
    out: Tensor,
    operator: str,
) -> None:
    runs = runs_adapters(Operator(operator), x.device, no_lora)
    if not runs or x.shape[0] == 0:
        return
    check_apart(x, out)
    tuning = tuning_of(x.device)
    height = tile_height(x.shape[0], tuning)
    step = tables_of_height(tables, height)
    if x.shape[0] < host_value(live) or may_map_more_rows(no_lora, x.device):
        # tiles of rows that x lacks would be read and written behind it. The rows are the first
        # ones, as in vLLM, whose kernels get `token_lora_mapping[:num_tokens]`
        step = tables_of_first_rows(row_slots, x.shape[0], max_slots=a.shape[0], height=height)
    operands = x, a, b, ranks, scales, *step, out
    launch_prepared(_launch_delta, operands, (tuple(slice_widths),), tuning)


def _launch_delta(
    x: Tensor,
    a: Tensor,
    b: Tensor,
    ranks: Tensor,
    scales: Tensor,
    tile_slots: Tensor,
    tile_rows: Tensor,
    num_tiles: Tensor,
    out: Tensor,
    slice_widths: Sequence[int],
) -> None:
    factors = whole(a, b, slice_widths)
    check_constants(ranks, scales, factors.a)
    # None: a buffer of the server is not on the stream that this may run on
    launch_delta(
        x,
        factors.a[:, 0],
        factors.b[:, 0],
        ranks,
        scales,
        tile_slots,
        tile_rows,
        num_tiles,
        None,
        out,
        slice_widths,
    )
