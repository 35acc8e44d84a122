"""The products of a MoE layer whose adapters are sharded by rank: shrink, exchange of what it
leaves between the ranks that share the experts, expand.

Gate and up gather the ranks of A and fold the expand into their product, as without exchange. Down
adds up the sums over its inputs; of its delta a rank has some columns, which a launch of its own
adds to the outputs of pairs, so that the sum over ranks holds each column once. fp32 is exchanged.
Rows of pairs without an adapter hold anything, and nothing reads them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from lorakernels.moe.delta.launch import Delta, expand, shrink
from lorakernels.moe.layer.launch import Exchange, Product, delta_of, launch_gemm


def launch_sharded(product: Product, base: Callable[[], Product], exchange: Exchange) -> None:
    """One of the two products. `base` gives it as the base layer computes it."""
    if product.activation is None:
        _down(product, base, exchange)
    else:
        _up(product, exchange)


def _up(product: Product, exchange: Exchange) -> None:
    """Gate and up, or up alone, with their adapters."""
    assert product.lora is not None, "there is nothing to exchange"
    part = _shrunk(product)
    rank, parts = product.lora.slots.b.shape[3], exchange.collective.size
    slices = len(part.shape.slice_widths)
    sums, gathered, ordered = _memory(product, part, parts)
    exchange.collective.all_gather(sums, gathered)
    # the ranks of each slice, which are apart, one behind the other, in the dtype of B
    by_part = gathered.view(parts, len(sums), slices, -1)
    ordered.view(len(sums), slices, parts, -1).copy_(by_part.permute(1, 2, 0, 3))
    whole = replace(part.shape, rank=rank)
    launch_gemm(product, replace(part, shape=whole, shrunk=ordered[None]), pdl=False)


def _down(product: Product, base: Callable[[], Product], exchange: Exchange) -> None:
    """Down, with this rank's columns of the delta."""
    assert product.lora is not None, "there is nothing to exchange"
    part = _shrunk(product)
    exchange.collective.all_reduce(part.shrunk[0])
    launch_gemm(base(), None, pdl=False)
    width = product.lora.slots.b.shape[2]
    own = replace(
        part,
        shape=replace(part.shape, slice_widths=(width,)),
        out=product.out.narrow(1, exchange.first_column, width),
        router_weights=product.router_weights,
    )
    expand(own, pdl=False)


def _shrunk(product: Product) -> Delta:
    """The delta behind its shrink, whose output is fp32 and lies at the start of the workspace."""
    assert product.lora is not None
    part = delta_of(product, product.lora, dtype=torch.float32)
    shrink(part, pdl=False)
    return part


def _memory(product: Product, part: Delta, parts: int) -> tuple[Tensor, Tensor, Tensor]:
    """What this rank brings [pairs, slices * held ranks] and, behind it in the workspace, what is
    gathered [parts, pairs, slices * held ranks], and that in order [pairs, slices * rank] in the
    dtype of the layer. Raises ValueError."""
    assert product.lora is not None
    sums, memory = part.shrunk[0], product.lora.shrunk
    size = sums.numel()
    if memory.numel() < (1 + 2 * parts) * size:
        raise ValueError(
            f"workspace must hold {(1 + 2 * parts) * size} values of an exchange between {parts} "
            f"ranks (got {memory.numel()})"
        )
    gathered = memory[size : (1 + parts) * size].view(parts, *sums.shape)
    ordered = memory[(1 + parts) * size : (1 + 2 * parts) * size]
    low = ordered.view(product.lora_input.dtype)[: parts * size]
    return sums, gathered, low.view(len(sums), -1)
