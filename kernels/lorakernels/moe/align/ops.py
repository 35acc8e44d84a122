"""The alignment of a step as one opaque operator, which a traced graph takes as it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lorakernels.batch.steps import hand_on_base_rows, note_rows, prepared_rows
from lorakernels.moe.align.at_once import launch_sort_at_once
from lorakernels.moe.align.compared import launch_comparing
from lorakernels.moe.align.counted import launch_counting
from lorakernels.moe.align.kernels.arguments import Routes
from lorakernels.moe.align.sort import launch_sorting
from lorakernels.moe.align.tables import PairTables
from lorakernels.moe.tiles import Alignment
from lorakernels.runtime.device import supports_pdl
from lorakernels.runtime.operators import register_operator
from lorakernels.runtime.prepared import launch_prepared
from lorakernels.runtime.streams import claim


def align_pairs(
    topk_ids: Tensor,
    token_slots: Tensor,
    expert_map: Tensor | None,
    buffers: list[Tensor],
    sizes: list[int],
    *,
    batch_rows: Tensor,
    step: Tensor,
) -> None:
    """Fill the buffers of PairMetadata, with its sizes, for the step that `topk_ids` routes.

    batch_rows: the table by which the rows of the batch are looked up; `step`: the tensor by which
    those of the pairs are noted. Raises ValueError with nothing changed.
    """
    torch.ops.lorakernels.align_pairs(
        topk_ids, token_slots, expert_map, buffers, sizes, batch_rows, step
    )


def _launch_of(way: Alignment) -> Callable[..., None]:
    if way is Alignment.SORTED_AT_ONCE:
        return launch_sort_at_once
    if way is Alignment.COMPARED:
        return launch_comparing
    return launch_sorting if way is Alignment.SORTED else launch_counting


def fill_tables(
    pairs: PairTables,
    topk_ids: Tensor,
    token_slots: Tensor,
    expert_map: Tensor | None,
    *,
    pdl: bool,
) -> None:
    """Fill every table of `pairs`."""
    # without a map its pointer is never read
    routes = Routes(topk_ids, token_slots, topk_ids if expert_map is None else expert_map)
    num_ids = 0 if expert_map is None else expert_map.shape[0]
    launch = _launch_of(pairs.alignment)
    launch(pairs, routes, num_ids=num_ids, is_mapped=expert_map is not None, pdl=pdl)


@register_operator("align_pairs", mutates=("tables",))
def _align_pairs(
    topk_ids: Tensor,
    token_slots: Tensor,
    expert_map: Tensor | None,
    tables: list[Tensor],
    sizes: list[int],
    batch_rows: Tensor,
    step: Tensor,
) -> None:
    pairs = PairTables.of(tables, topk_ids.shape[0], sizes)
    align_step(pairs, topk_ids, token_slots, expert_map, batch_rows=batch_rows, step=step)


def align_step(
    pairs: PairTables,
    topk_ids: Tensor,
    token_slots: Tensor,
    expert_map: Tensor | None,
    *,
    batch_rows: Tensor,
    step: Tensor,
) -> None:
    """`align_pairs` for callers that no graph is traced of, which need not pay for an operator."""
    _check_routes(topk_ids, expert_map)
    _check_rows(pairs, prepared_rows(batch_rows))
    claim(step, "pairs")
    note_rows(step, pairs.num_rows)
    hand_on_base_rows(batch_rows, step, topk_ids.device)
    routes = topk_ids, token_slots, expert_map
    launch_prepared(_launch_step, (*routes, pairs.buffers), pairs.sizes, pairs.tuning)


def _launch_step(
    topk_ids: Tensor,
    token_slots: Tensor,
    expert_map: Tensor | None,
    *buffers_and_sizes: Any,
) -> None:
    """The buffers of PairMetadata, then its sizes."""
    *buffers, top_k, num_experts, max_slots, with_base, is_invariant = buffers_and_sizes
    sizes = top_k, num_experts, max_slots, with_base, is_invariant
    pairs = PairTables.of(buffers, topk_ids.shape[0], sizes)
    fill_tables(pairs, topk_ids, token_slots, expert_map, pdl=supports_pdl(topk_ids.device))


def _check_routes(topk_ids: Tensor, expert_map: Tensor | None) -> None:
    for name, tensor in (("topk_ids", topk_ids), ("expert_map", expert_map)):
        if tensor is not None and not tensor.is_contiguous():
            raise ValueError(f"{name} must be contiguous (got strides {tensor.stride()})")


def _check_rows(pairs: PairTables, batch_rows: int | None) -> None:
    """The step has as many rows as the batch was prepared for, where that is known."""
    most = pairs.tables.pair_slots.shape[0] // pairs.top_k
    if pairs.num_rows > most:
        raise ValueError(f"topk_ids may have {most} rows (got {pairs.num_rows})")
    if batch_rows is not None and pairs.num_rows != batch_rows:
        raise ValueError(
            f"topk_ids must have {batch_rows} rows, as the batch was prepared for "
            f"(got {pairs.num_rows})"
        )
