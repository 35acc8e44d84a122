"""A whole MoE layer on prepared pairs: w13, activation, w2, sum over the choices of a token.

With adapters each product is preceded by the shrink of its input, and the expand is folded into
the product itself: the layer has two more launches than without, and no pass over its outputs. In
a form of several streams the shrink runs beside the product, which is cut before the expand.
All of it is one opaque operator that only gets tensors and sizes, as `dense_delta` is; the number
of rows is none of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from lorakernels.batch.steps import prepared_rows, runs_adapters
from lorakernels.common.choices import check_choice, choice_number
from lorakernels.common.quantised import Quantised, quantise_rows
from lorakernels.common.stacked_weights import SlotTensors
from lorakernels.dense.sharded import warn_of_one_stream
from lorakernels.moe.align.metadata import PairMetadata
from lorakernels.moe.align.tables import PairTables
from lorakernels.moe.layer.check import check_layer, check_operands, check_pairs
from lorakernels.moe.layer.forms import MoEForm, plan_form, sharded_form
from lorakernels.moe.layer.launch import (
    Adapters,
    Exchange,
    Product,
    launch_beside,
    launch_product,
    launch_sum,
)
from lorakernels.moe.layer.sharded import launch_sharded
from lorakernels.moe.layer.types import (
    Activation,
    ExpertBuffers,
    ExpertLoRA,
    Formula,
    LayerOperands,
    RouterWeight,
)
from lorakernels.runtime.collectives import collective_of
from lorakernels.runtime.device import on_device_of, supports_pdl
from lorakernels.runtime.operators import register_operator
from lorakernels.runtime.options import dual_stream
from lorakernels.runtime.streams import claim

__all__ = [
    "Activation",
    "ExpertBuffers",
    "ExpertLoRA",
    "RouterWeight",
    "run_experts",
]


def run_experts(
    x: Tensor,
    w13: Tensor | Quantised,
    w2: Tensor | Quantised,
    router_weights: Tensor,
    pairs: PairMetadata,
    buffers: ExpertBuffers,
    out: Tensor,
    *,
    w13_bias: Tensor | None = None,
    w2_bias: Tensor | None = None,
    lora: ExpertLoRA | None = None,
    activation: Activation = Activation.SILU_GATED,
    router_weight: RouterWeight = RouterWeight.ON_OUTPUT,
    quantised_x: Quantised | None = None,
    form: MoEForm | None = None,
) -> None:
    """out[t] = sum over the choices p of t of w[p] * (act(x[t] @ W13[e].T + b13[e]) @ W2[e].T +
    b2[e]), each product with the delta of the slot of t.

    x [rows, H] contiguous in the layer's dtype; the adapters are always applied to it as it is,
        even where `quantised_x` replaces it for the base product (vllm #42120).
    w13 [E, 2 * I or I, H], gate above up, w2 [E, H, I] contiguous. router_weights fp32 [rows,
        top_k]. w13_bias [E, 2 * I or I] and w2_bias [E, H] in the layer's dtype; there are none
        with router weights on the input.
    pairs: prepared, `with_base`. out [rows, H]. Choices without a local expert add nothing.
    form: None lets the plan choose; adapters that are sharded by rank have SINGLE alone.
    Products accumulate in fp32, the activation included; act and y are rounded to the dtype.
    Deterministic. Raises ValueError.
    """
    check_choice("router_weight", router_weight, RouterWeight)
    number = choice_number("form", form, MoEForm)
    operands = LayerOperands(
        x=x,
        w13=w13,
        w2=w2,
        w13_bias=w13_bias,
        w2_bias=w2_bias,
        quantised_x=quantised_x,
        router_weights=router_weights,
        act=buffers.act,
        y=buffers.y,
        out=out,
        activation=activation,
        router_weight=router_weight,
    )
    check_pairs(pairs, lora)
    check_layer(operands, lora)
    if lora is not None and lora.group >= 0:
        # refuses others; the operator takes one stream whoever calls it
        sharded_form(form)
    arguments = _flatten(operands, pairs, lora)
    torch.ops.lorakernels.run_experts(*arguments, number)


@register_operator("run_experts", mutates=("shrunk", "act", "y", "out"))
def _run_experts(
    x: Tensor,
    weights: list[Tensor],
    x_quantised: list[Tensor],
    w13_bias: Tensor | None,
    w2_bias: Tensor | None,
    router_weights: Tensor,
    pair_buffers: list[Tensor],
    pair_sizes: list[int],
    step: Tensor,
    slot_tensors: list[Tensor],
    shrunk: Tensor | None,
    act: Tensor,
    y: Tensor,
    out: Tensor,
    formula: str,
    is_gated: bool,
    alpha: float,
    limit: float,
    on_input: bool,
    group: int,
    first_column: int,
    form: int,
) -> None:
    # the inverse of _flatten
    quantised_x = Quantised(*x_quantised) if x_quantised else None
    w13, w2 = weights if quantised_x is None else (Quantised(*weights[:2]), Quantised(*weights[2:]))
    layer = LayerOperands(
        x=x,
        w13=w13,
        w2=w2,
        w13_bias=w13_bias,
        w2_bias=w2_bias,
        quantised_x=quantised_x,
        router_weights=router_weights,
        act=act,
        y=y,
        out=out,
        activation=Activation(Formula(formula), is_gated, alpha, limit),
        router_weight=RouterWeight.ON_INPUT if on_input else RouterWeight.ON_OUTPUT,
    )
    num_rows = prepared_rows(step)
    pairs = PairTables.of(pair_buffers, x.shape[0] if num_rows is None else num_rows, pair_sizes)
    check_operands(layer, pairs)
    claim(act, "scratch")
    if shrunk is not None:
        claim(shrunk, "workspace")
    if pairs.num_rows:
        exchange = _exchange(group, first_column, x.device)
        up, down = (slot_tensors[:4], slot_tensors[4:])
        adapters = (_adapters(up, shrunk, exchange), _adapters(down, shrunk, exchange))
        plan = MoEForm.SINGLE if group >= 0 else _form(form, pairs, x.device)
        _launch(layer, pairs, *adapters, form=plan, adds=runs_adapters(step, x.device))


def _form(form: int, pairs: PairTables, device: torch.device) -> MoEForm:
    if form:
        return MoEForm(form)
    return plan_form(pairs.num_pairs, pairs.tuning, dual_stream=dual_stream(device))


def _exchange(group: int, first_column: int, device: torch.device) -> Exchange | None:
    """None for adapters that are not sharded by rank, and for a rank that is alone."""
    if group < 0:
        return None
    if dual_stream(device):
        warn_of_one_stream()
    collective = collective_of(group)
    return Exchange(collective, first_column) if collective.size > 1 else None


def _launch(
    layer: LayerOperands,
    pairs: PairTables,
    up: Adapters | None,
    down: Adapters | None,
    *,
    form: MoEForm,
    adds: bool,
) -> None:
    """Both products, with their adapters, and the sum. Without `adds` the kernels of the adapters
    are left out, and nothing is exchanged."""
    x, quantised_x, out = layer.x, layer.quantised_x, layer.out
    act, y = layer.act[: pairs.num_pairs], layer.y[: pairs.num_pairs]
    router_weights, on_input = layer.router_weights, layer.router_weight is RouterWeight.ON_INPUT
    first = Product(
        x=x if quantised_x is None else quantised_x,
        w=layer.w13,
        bias=layer.w13_bias,
        out=act,
        pairs=pairs,
        lora_input=x,
        lora=up,
        activation=layer.activation,
        router_weights=router_weights if on_input else None,
    )
    second = Product(
        x=act,
        w=layer.w2,
        bias=layer.w2_bias,
        out=y,
        pairs=pairs,
        lora_input=act,
        lora=down,
        activation=None,
        router_weights=None if on_input else router_weights,
    )

    def base_of_second() -> Product:
        return second if quantised_x is None else replace(second, x=quantise_rows(act))

    pdl = supports_pdl(x.device)

    def run(product: Product, base: Callable[[], Product]) -> None:
        if form is MoEForm.DUAL and product.lora is not None:
            launch_beside(product, base, adds=adds)
        elif adds and product.lora is not None and product.lora.exchange is not None:
            launch_sharded(product, base, product.lora.exchange)
        else:
            launch_product(base(), pdl=pdl, adds=adds)

    with on_device_of(out):
        run(first, lambda: first)
        run(second, base_of_second)
        launch_sum(y, pairs, out, pdl=pdl)


def _flatten(
    operands: LayerOperands, pairs: PairMetadata, lora: ExpertLoRA | None
) -> tuple[object, ...]:
    """The arguments of the operator, which takes only tensors, numbers and lists of them."""
    quantised_x = operands.quantised_x
    projections = () if lora is None else (lora.w13, lora.w2)
    activation = operands.activation
    return (
        operands.x,
        _tensors(operands.w13, operands.w2),
        [] if quantised_x is None else _tensors(quantised_x),
        operands.w13_bias,
        operands.w2_bias,
        operands.router_weights,
        pairs.buffers,
        pairs.sizes,
        pairs.step,
        [tensor for weights in projections for tensor in weights.tensors],
        None if lora is None else lora.workspace.shrunk,
        operands.act,
        operands.y,
        operands.out,
        activation.formula.value,
        activation.is_gated,
        activation.alpha,
        activation.limit,
        operands.router_weight is RouterWeight.ON_INPUT,
        -1 if lora is None else lora.group,
        0 if lora is None else lora.w2.first_column,
    )


def _tensors(*operands: Tensor | Quantised) -> list[Tensor]:
    """Values, followed by their scales where an operand is quantised."""
    flat = []
    for operand in operands:
        flat += [operand.values, operand.scales] if isinstance(operand, Quantised) else [operand]
    return flat


def _adapters(
    slot_tensors: list[Tensor], shrunk: Tensor | None, exchange: Exchange | None
) -> Adapters | None:
    return None if shrunk is None else Adapters(SlotTensors(*slot_tensors), shrunk, exchange)
