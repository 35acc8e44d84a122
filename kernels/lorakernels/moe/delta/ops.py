"""The delta of a MoE projection: public functions and the operator behind them.

`moe_delta` is one opaque operator that only gets tensors and sizes, as `dense_delta` is. The number
of rows is none of these sizes: the operator looks it up by the pairs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lorakernels.batch.steps import prepared_rows, runs_adapters
from lorakernels.common.choices import choice_number
from lorakernels.common.stacked_weights import SlotTensors, device_of
from lorakernels.dense.check import check_apart, check_like, check_whole, overlaps_itself
from lorakernels.moe.align.kernels.arguments import Tables
from lorakernels.moe.align.metadata import PairMetadata
from lorakernels.moe.align.tables import PairTables
from lorakernels.moe.delta.launch import Delta, launch, shape_of
from lorakernels.moe.delta.plan import MoEPath, MoEShape, plan_path
from lorakernels.moe.delta.sizes import largest_shrunk, shrunk_shape
from lorakernels.moe.weights import ExpertWeights
from lorakernels.runtime.device import keep_address, supports_pdl
from lorakernels.runtime.operators import register_operator
from lorakernels.runtime.prepared import FixedTensors, launch_prepared
from lorakernels.runtime.streams import claim

__all__ = ["MoEPath", "MoEWorkspace", "moe_delta"]


class MoEWorkspace:
    """The shrink output between shrink and expand: fp32, allocated once, shared by layers that run
    one after the other. Large enough for every batch of up to `max_tokens` rows."""

    def __init__(self, layers: Sequence[ExpertWeights], *, max_tokens: int, top_k: int) -> None:
        layers = list(layers)
        if not layers:
            raise ValueError("layers must name at least one layer (got none)")
        for layer in layers:
            if not isinstance(layer, ExpertWeights):
                raise ValueError(
                    "layers must be ExpertWeights, such as the `w13_slots` of a layer "
                    f"(got a {type(layer).__name__})"
                )
        for name, size in (("max_tokens", max_tokens), ("top_k", top_k)):
            if size < 1:
                raise ValueError(f"{name} must be at least 1 (got {size})")
        pairs = max_tokens * top_k
        size = max(_largest_step(layer, pairs) for layer in layers)
        # an exchange between ranks writes it in any mode
        with torch.inference_mode(mode=False):
            shrunk = torch.empty(size, dtype=torch.float32, device=device_of(layers))
        self.shrunk = keep_address(shrunk)


def moe_delta(
    x: Tensor,
    weights: ExpertWeights,
    pairs: PairMetadata,
    workspace: MoEWorkspace,
    out: Tensor,
    *,
    router_weights: Tensor | None = None,
    add_inputs: bool = True,
    path: MoEPath | None = None,
) -> None:
    """out[p] += w[p] * scale * (x_row @ A[slot, expert].T) @ B[slot, expert].T for each pair p
    that has a slot and an expert, in place.

    x [rows, in_features], then x_row = x[p // top_k], or [rows * top_k, in_features], then
        x_row = x[p]; any strides. out [rows * top_k, out_features], any strides. Both of the
        weights' dtype. Pairs without a slot or an expert are neither read nor written.
    router_weights: w, fp32 [rows, top_k], contiguous; 1 without it.
    add_inputs: False overwrites instead, where there is a delta.
    path: None lets the plan choose; TWO_KERNEL replaces a path that does not support the shape.
    Deterministic. Raises ValueError.
    """
    _check_batch(x, weights, pairs)
    check_devices(pairs, workspace, weights.a.device)
    torch.ops.lorakernels.moe_delta(
        x,
        list(weights.tensors),
        list(weights.slice_widths),
        pairs.buffers,
        pairs.sizes,
        pairs.step,
        workspace.shrunk,
        out,
        router_weights,
        add_inputs,
        choice_number("path", path, MoEPath),
    )


@register_operator("moe_delta", mutates=("shrunk", "out"))
def _moe_delta(
    x: Tensor,
    slot_tensors: list[Tensor],
    slice_widths: list[int],
    pair_buffers: list[Tensor],
    pair_sizes: list[int],
    step: Tensor,
    shrunk: Tensor,
    out: Tensor,
    router_weights: Tensor | None,
    add_inputs: bool,
    path: int,
) -> None:
    slots = SlotTensors(*slot_tensors)
    num_rows = prepared_rows(step)
    if num_rows is None:
        # a pair is a row of out
        num_rows = out.numel() // (slots.b.shape[2] * pair_sizes[0])
    pairs = PairTables.of(pair_buffers, num_rows, pair_sizes)
    add_delta(
        *(x, FixedTensors(slots), slice_widths, pairs, step, shrunk),
        *(out, router_weights, add_inputs, MoEPath(path) if path else None),
    )


def add_delta(
    x: Tensor,
    slots: FixedTensors,
    slice_widths: Sequence[int],
    pairs: PairTables,
    step: Tensor,
    shrunk: Tensor | None,
    out: Tensor,
    router_weights: Tensor | None,
    add_inputs: bool,
    path: MoEPath | None,
) -> None:
    """`moe_delta` for callers that no graph is traced of, which need not pay for an operator.

    slots: the fields of SlotTensors. step: that of the pairs. shrunk: fp32, of `shrunk_shape` at
    least where the path is TWO_KERNEL; None allocates it, on the stream of the caller. Raises
    ValueError.
    """
    num_pairs, num_experts = pairs.num_pairs, pairs.num_experts
    _check_rows(x, pairs)
    check_apart(x, out)
    if num_pairs == 0 or not runs_adapters(step, x.device):
        _check_layouts(x, SlotTensors(*slots.tensors), num_pairs, out, router_weights)
        return
    if shrunk is not None:
        claim(shrunk, "workspace")
    launch_prepared(
        _launch_delta,
        (x, slots, shrunk, out, router_weights, pairs.buffers),
        (tuple(slice_widths), num_pairs, num_experts, add_inputs, path),
        pairs.tuning,
    )


def _launch_delta(
    x: Tensor,
    a: Tensor,
    b: Tensor,
    ranks: Tensor,
    scales: Tensor,
    shrunk: Tensor | None,
    out: Tensor,
    router_weights: Tensor | None,
    *tables_and_constants: Any,
) -> None:
    """The buffers of PairMetadata, then the widths of the slices, the pairs and experts of the
    step, whether inputs are added, and the path or None."""
    *tables, _, slice_widths, num_pairs, num_experts, add_inputs, path = tables_and_constants
    slots = SlotTensors(a, b, ranks, scales)
    _check_layouts(x, slots, num_pairs, out, router_weights)
    shape = shape_of(a, slice_widths, num_pairs=num_pairs, num_experts=num_experts)
    chosen = plan_path(shape, path)
    delta = Delta(
        shape=shape,
        x=x,
        pairs_per_x=num_pairs // x.shape[0],
        slots=slots,
        tables=Tables(*tables),
        shrunk=_shrunk_of(shape, chosen, shrunk, x.device),
        out=out,
        router_weights=router_weights,
        add_inputs=add_inputs,
    )
    launch(delta, chosen, pdl=supports_pdl(x.device))


def _shrunk_of(
    shape: MoEShape, path: MoEPath, shrunk: Tensor | None, device: torch.device
) -> Tensor:
    """The shrink output of a delta, which has values where its path needs them. ValueError."""
    if shrunk is None:
        size = shrunk_shape(shape) if path is MoEPath.TWO_KERNEL else (0,)
        return torch.empty(size, dtype=torch.float32, device=device)
    return view_shrunk(shrunk, shape) if path is MoEPath.TWO_KERNEL else shrunk


def view_shrunk(shrunk: Tensor, shape: MoEShape) -> Tensor:
    """The part of a workspace's shrink output that a batch uses. Raises ValueError."""
    wanted = shrunk_shape(shape)
    size = math.prod(wanted)
    if shrunk.numel() < size:
        raise ValueError(
            f"workspace must hold {size} values of shrink output (got {shrunk.numel()})"
        )
    return shrunk[:size].view(wanted)


def _largest_step(weights: ExpertWeights, num_pairs: int) -> int:
    shape = shape_of_batch(weights, num_pairs)
    return largest_shrunk(shape) + weights.exchanged_copies * num_pairs * shape.ranks_of_all_slices


def shape_of_batch(weights: ExpertWeights, num_pairs: int) -> MoEShape:
    """What the plans of a batch depend on."""
    return shape_of(
        weights.a, weights.slice_widths, num_pairs=num_pairs, num_experts=weights.num_experts
    )


def check_devices(pairs: PairMetadata, workspace: MoEWorkspace, device: torch.device) -> None:
    """The tables and the workspace are on the device of the operands. Raises ValueError."""
    for name, tensor in (("pairs", pairs.step), ("workspace", workspace.shrunk)):
        if tensor.device != device:
            raise ValueError(f"{name} must be on {device} (got {tensor.device})")


def _check_batch(x: Tensor, weights: ExpertWeights, pairs: PairMetadata) -> None:
    """What `x` and the pairs must be for any number of rows: part of a traced graph, so it compares
    no size that changes from step to step."""
    if x.dim() != 2:
        raise ValueError(f"x must have two dimensions (got shape {list(x.shape)})")
    for name in ("num_experts", "num_slots"):
        have = getattr(weights, name)
        wanted = pairs.num_experts if name == "num_experts" else pairs.max_slots
        if have != wanted:
            raise ValueError(f"weights must have {wanted} {name[4:]} (got {have})")


def _check_rows(x: Tensor, pairs: PairTables) -> None:
    if x.shape[0] not in (pairs.num_rows, pairs.num_pairs):
        raise ValueError(
            f"x must have {pairs.num_rows} rows or one for each of {pairs.num_pairs} pairs, as "
            f"the pairs were prepared for (got shape {list(x.shape)})"
        )


def _check_layouts(
    x: Tensor, slots: SlotTensors, num_pairs: int, out: Tensor, router_weights: Tensor | None
) -> None:
    a, b = slots.a, slots.b
    check_whole(a, b)
    if tuple(out.shape) != (num_pairs, b.shape[2]):
        raise ValueError(f"out must be [{num_pairs}, {b.shape[2]}] (got {list(out.shape)})")
    if x.shape[1] != a.shape[4]:
        raise ValueError(f"x must have {a.shape[4]} columns (got {x.shape[1]})")
    check_like("x", x, a)
    check_like("out", out, a)
    if overlaps_itself(out):
        raise ValueError(
            "out must not overlap itself in memory, where pairs would be written over each other "
            f"(got strides {list(out.stride())})"
        )
    if router_weights is None:
        return
    if router_weights.dtype != torch.float32 or router_weights.numel() != num_pairs:
        raise ValueError(
            f"router_weights must be float32 with {num_pairs} values "
            f"(got {router_weights.dtype} with shape {list(router_weights.shape)})"
        )
    if not router_weights.is_contiguous() or router_weights.device != a.device:
        raise ValueError(f"router_weights must be contiguous and on {a.device}")
