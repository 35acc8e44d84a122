"""Launches of a MoE layer: arguments and grids, nothing else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum, auto
from functools import partial

import torch
from torch import Tensor

from lorakernels.common.quantised import Quantised
from lorakernels.common.sizes import rank_vector
from lorakernels.common.stacked_weights import SlotTensors
from lorakernels.moe.align.tables import PairTables
from lorakernels.moe.delta.launch import Delta, shape_of, shrink
from lorakernels.moe.delta.plan import MoEShape
from lorakernels.moe.layer.kernels.choices import sum_choices_kernel
from lorakernels.moe.layer.kernels.gemm import moe_gemm_kernel
from lorakernels.moe.layer.plan import fold_ranks, group_ranks, plan_gemm
from lorakernels.moe.layer.types import Activation
from lorakernels.runtime.collectives import Collective
from lorakernels.runtime.device import launch_options
from lorakernels.runtime.streams import fork_join


@dataclass(frozen=True, slots=True)
class Exchange:
    """The ranks that share the experts of a layer whose adapters are sharded by rank, and where the
    columns begin that this one has of the delta of down."""

    collective: Collective
    first_column: int


@dataclass(frozen=True, slots=True)
class Adapters:
    """The adapters of one product: the buffers of ExpertWeights, and the shrink output of a
    workspace."""

    slots: SlotTensors
    shrunk: Tensor
    exchange: Exchange | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """The operands of one product of a layer: out[p] = act(x_row @ W[e].T + bias[e] + delta), times
    the router weight before the activation, or instead of it."""

    x: Tensor | Quantised
    w: Tensor | Quantised
    bias: Tensor | None
    out: Tensor
    pairs: PairTables
    # what the adapters are applied to: x before it was quantised
    lora_input: Tensor
    lora: Adapters | None
    activation: Activation | None
    router_weights: Tensor | None

    @property
    def is_gated(self) -> bool:
        return self.activation is not None and self.activation.is_gated

    @property
    def values(self) -> tuple[Tensor, Tensor]:
        """Of x and w, without their scales."""
        x, w = self.x, self.w
        return (
            x.values if isinstance(x, Quantised) else x,
            w.values if isinstance(w, Quantised) else w,
        )

    @property
    def scales(self) -> tuple[Tensor, Tensor]:
        """Of x and w where they are quantised, otherwise tensors that no kernel reads."""
        x, w = self.x, self.w
        return (
            x.scales if isinstance(x, Quantised) else self.out,
            w.scales if isinstance(w, Quantised) else self.out,
        )


def launch_product(product: Product, *, pdl: bool, adds: bool = True) -> None:
    """The shrink of the adapters, if there are any, and the product with the expand folded in; the
    product alone without `adds`."""
    delta = delta_of(product, product.lora) if product.lora is not None and adds else None
    if delta is not None:
        shrink(delta, pdl=pdl)
    launch_gemm(product, delta, pdl=pdl)


def launch_beside(product: Product, base: Callable[[], Product], *, adds: bool = True) -> None:
    """The same, with the shrink on another stream, beside the product: behind both, a second launch
    goes on from the sums of the first one, and expands. `base` gives the product once more, as the
    base layer computes it, and is called beside the shrink as well. Without `adds` there is no
    shrink and no expand, and the product is cut all the same, which keeps its roundings. Nothing is
    launched dependently; see supports_pdl."""
    assert product.lora is not None, "there is nothing to run beside the product"
    delta, pairs = delta_of(product, product.lora) if adds else None, product.pairs
    columns = product.out.shape[1] * (2 if product.is_gated else 1)
    # written and read on the stream of the fork
    sums = product.out.new_empty(pairs.num_pairs, columns, dtype=torch.float32)

    def multiply() -> None:
        # the bias goes with the sums, because a whole product adds it in one operation with the
        # scales, with one rounding; router weights follow the expand
        of_sums = replace(base(), out=sums, router_weights=None)
        launch_gemm(of_sums, None, pdl=False, part=_Part.SUMS)

    sides = () if delta is None else (partial(shrink, delta, pdl=False),)
    fork_join(sums.device, multiply, *sides)
    launch_gemm(replace(product, x=sums, bias=None), delta, pdl=False, part=_Part.REST)


class _Part(Enum):
    """What a launch computes of a product: its sums, as fp32 in `out`; all that follows from sums
    in `x`; or both."""

    WHOLE = auto()
    SUMS = auto()
    REST = auto()


def launch_gemm(
    product: Product, delta: Delta | None, *, pdl: bool, part: _Part = _Part.WHOLE
) -> None:
    (x, w), out, pairs, given = product.values, product.out, product.pairs, product.lora_input
    width, depth = w.shape[1] // (2 if product.is_gated else 1), x.shape[1]
    height = pairs.base_height
    plan = plan_gemm(height, itemsize=given.element_size(), is_gated=product.is_gated)
    tables, weights = pairs.tables, product.router_weights
    activation = None if part is _Part.SUMS else product.activation
    moe_gemm_kernel[(-(-width // plan.block_n) * pairs.base_tile_programs,)](
        x,
        w,
        *product.scales,
        product.bias,
        # without adapters only the dtype of B is used
        *((delta.shrunk, *delta.slots[1:]) if delta else (out, given, out, out)),
        out if weights is None else weights,
        tables.pair_slots,
        tables.base_experts,
        tables.base_pairs,
        tables.num_base_tiles,
        out,
        x.stride(0),
        w.stride(0),
        out.stride(0),
        *(delta.b_strides if delta else (0, 0)),
        delta.slots.b.shape[0] if delta else 0,
        -depth,
        WIDTH=width,
        ROWS_PER_X=pairs.num_pairs // x.shape[0],
        HEIGHT=height,
        BLOCK_N=plan.block_n,
        BLOCK_K=plan.block_k,
        STAGES=plan.num_stages,
        EVEN_K=depth % plan.block_k == 0,
        EVEN_N=width % plan.block_n == 0,
        GATED=int(product.is_gated),
        ACTIVATION=activation.formula.value if activation else "",
        ALPHA=activation.alpha if activation else 0.0,
        LIMIT=activation.limit if activation else 0.0,
        WEIGHTED=weights is not None,
        SCALED=isinstance(product.x, Quantised),
        LORA=delta is not None,
        STORES_SUMS=part is _Part.SUMS,
        LOADS_SUMS=part is _Part.REST,
        IEEE=given.dtype == torch.float32,
        PDL=pdl,
        num_warps=plan.num_warps,
        num_stages=plan.num_stages,
        **_fold_constants(delta, height),
        **launch_options(pdl),
    )


def _fold_constants(delta: Delta | None, height: int) -> dict[str, int]:
    if delta is None:
        return {"S": 1, "R": 1, "BLOCK_R": 16, "GROUP_R": 16, "RANK_ALIGN": 1, "TOGETHER": 0}
    rank = delta.shape.rank
    return {
        "S": len(delta.shape.slice_widths),
        "R": rank,
        "BLOCK_R": fold_ranks(rank, height),
        "GROUP_R": group_ranks(height),
        "RANK_ALIGN": rank_vector(rank),
        "TOGETHER": int(delta.scales_ranks),
    }


def delta_of(product: Product, lora: Adapters, *, dtype: torch.dtype | None = None) -> Delta:
    """The delta of a product, with a shrink output of the layer's dtype or of another one."""
    x, pairs = product.lora_input, product.pairs
    widths = (product.out.shape[1],) * (2 if product.is_gated else 1)
    sizes = {"num_pairs": pairs.num_pairs, "num_experts": pairs.num_experts}
    shape = shape_of(lora.slots.a, widths, **sizes)
    return Delta(
        shape=shape,
        x=x,
        pairs_per_x=pairs.num_pairs // x.shape[0],
        slots=lora.slots,
        tables=pairs.tables,
        shrunk=_ranks_of_pairs(lora.shrunk, dtype or x.dtype, shape),
        out=x,
        router_weights=None,
        add_inputs=True,
        # in fp16 the product of both may not fit where the result does; an exchange adds up first
        scales_ranks=dtype is None and x.dtype == torch.bfloat16,
    )


def _ranks_of_pairs(shrunk: Tensor, dtype: torch.dtype, shape: MoEShape) -> Tensor:
    """[1, pairs, slices * rank] of a dtype, in the memory of the shrink output."""
    ranks = shape.ranks_of_all_slices
    values = shrunk.view(dtype)[: shape.num_pairs * ranks]
    if values.numel() < shape.num_pairs * ranks:
        raise ValueError(
            f"workspace must hold {shape.num_pairs} pairs of {ranks} ranks (got {values.numel()})"
        )
    return values.view(1, shape.num_pairs, ranks)


def launch_sum(y: Tensor, pairs: PairTables, out: Tensor, *, pdl: bool) -> None:
    """out[t] = the sum of y[p] over the choices p of token t that have a local expert."""
    rows, hidden = out.shape
    block = 1024 if hidden >= 1024 else 256
    sum_choices_kernel[(rows, -(-hidden // block))](
        y,
        pairs.tables.pair_experts,
        out,
        y.stride(0),
        out.stride(0),
        hidden,
        TOP_K=pairs.top_k,
        BLOCK=block,
        PDL=pdl,
        num_warps=4,
        **launch_options(pdl),
    )
