"""The alignment of a step as one opaque operator, which a traced graph takes as it is."""

from __future__ import annotations

import torch
from torch import Tensor

from lorakernels.moe.align.kernels.arguments import Routes
from lorakernels.moe.align.launch import launch_alignment
from lorakernels.moe.align.sort import launch_sorting
from lorakernels.moe.align.tables import PairTables
from lorakernels.runtime.device import on_device_of, supports_pdl


def align_pairs(
    topk_ids: Tensor,
    token_slots: Tensor,
    expert_map: Tensor | None,
    buffers: list[Tensor],
    *,
    num_experts: int,
    max_slots: int,
    with_base: bool,
) -> None:
    """Fill the buffers of PairMetadata for the step that `topk_ids` routes."""
    torch.ops.lorakernels.align_pairs(
        topk_ids, token_slots, expert_map, buffers, num_experts, max_slots, with_base
    )


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
    launch = launch_sorting if pairs.is_sorted else launch_alignment
    launch(pairs, routes, num_ids=num_ids, is_mapped=expert_map is not None, pdl=pdl)


@torch.library.custom_op("lorakernels::align_pairs", mutates_args=("tables",))
def _align_pairs(
    topk_ids: Tensor,
    token_slots: Tensor,
    expert_map: Tensor | None,
    tables: list[Tensor],
    num_experts: int,
    max_slots: int,
    with_base: bool,
) -> None:
    rows, top_k = topk_ids.shape
    pairs = PairTables.of(tables, [rows, top_k, num_experts, max_slots, int(with_base)])
    with on_device_of(topk_ids):
        fill_tables(pairs, topk_ids, token_slots, expert_map, pdl=supports_pdl(topk_ids.device))
