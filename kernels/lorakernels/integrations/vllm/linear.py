"""The delta of a linear layer of vLLM, and of its logits, as one operator.

vLLM traces what its linear layers call. So the operator gets tensors and widths alone, and finds
out when it runs how many rows a step has, which tables belong to them, and whether it is captured.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lorakernels.common.slice_stacks import check_constants, whole
from lorakernels.common.stacked_weights import SlotTensors
from lorakernels.dense.check import check_operands
from lorakernels.dense.launch import launch_expand, launch_shrink
from lorakernels.dense.ops import shape_of
from lorakernels.dense.plan import plan_shrunk
from lorakernels.integrations.vllm.declaration import runs_adapters
from lorakernels.integrations.vllm.launches import Operator
from lorakernels.integrations.vllm.tables import (
    StepTables,
    host_value,
    tables_of_first_rows,
    tables_of_height,
)
from lorakernels.runtime.device import supports_pdl
from lorakernels.runtime.operators import register_operator


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
    factors = whole(a, b, slice_widths)
    check_constants(ranks, scales, factors.a)
    packed_a, packed_b = factors.a[:, 0], factors.b[:, 0]
    check_operands(x, packed_a, packed_b, out)
    slots = packed_a.shape[0]
    weights = SlotTensors(packed_a, packed_b, ranks, scales)
    shape = shape_of(x.shape[0], packed_a, slice_widths)
    step = tables_of_height(tables, shape.height)
    if x.shape[0] < host_value(live):
        # tiles of rows that x lacks would be read and written behind it. The rows are the first
        # ones, as in vLLM, whose kernels get `token_lora_mapping[:num_tokens]`
        step = tables_of_first_rows(row_slots, x.shape[0], max_slots=slots, height=shape.height)
    # allocated here, because a buffer of the server is not on the stream that this may run on
    shrunk = torch.empty(plan_shrunk(shape, slots), dtype=torch.float32, device=x.device)
    pdl = supports_pdl(x.device)
    launch_shrink(x, weights, shape, step, shrunk, pdl=pdl)
    launch_expand(shrunk, weights, shape, step, out, pdl=pdl)
