"""The mathematics of a whole MoE layer, and the choice between it and that of other sites.

    out[t] = sum over the choices e of t of w * down_e(silu(gate_e(x[t])) * up_e(x[t]))

where each projection adds its bias, if it has one, and the delta of the token's slot; other
activations are in activations.py. With one slice the activation is silu(up).
With router weights on the input, w multiplies gate and up instead. The inputs of the base products
of a quantised layer are quantised, those of deltas are not.

golden: fp64. eager: products accumulate in fp32, the activation included; act and the output of
each pair are rounded to the dtype, and so is the sum of each rank of a group.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from loragate.matrix.case import Activation, Case
from loragate.oracles.numeric.golden import Golden, eager, golden, plain_bases
from loragate.oracles.numeric.layer import Layer
from loragate.protocol import BaseExperts, BaseLayer, Batch, Pool


def golden_of(
    case: Case, pool: Pool, batch: Batch, base: BaseLayer | None, *, rounds_all: bool = False
) -> Golden:
    """The right result, for any site. rounds_all: in a MoE layer whatever a kernel could write may
    be rounded to the dtype: B with the scale in it, base outputs and deltas apart, their sums, and
    the value of the activation function before it is multiplied by up."""
    if isinstance(base, BaseExperts):
        return _golden_layer(case, pool, batch, base, rounds_all=rounds_all)
    return golden(pool, batch, base, case.write)


def eager_of(case: Case, pool: Pool, batch: Batch, base: BaseLayer | None) -> Tensor:
    """The result of a plain computation in the case's dtype, for any site."""
    if isinstance(base, BaseExperts):
        return _eager_layer(case, pool, batch, base)
    return eager(case, pool, batch, base)


def plain_bases_of(case: Case, batch: Batch, base: BaseLayer | None) -> tuple[Tensor, ...]:
    """The output of the base layer alone in the case's dtype, where a site has one that is not
    cut, in each of the ways that a subject may compute it."""
    return () if isinstance(base, BaseExperts) else plain_bases(case, batch, base)


def rounds_always(case: Case) -> str | None:
    """The reason why a case of moe_layer has no data that leave nothing to round, if there is
    one."""
    if case.activation is Activation.SWIGLU_OAI:
        return "the sigmoid of a gate that is clamped is never 1"
    return None


def _golden_layer(
    case: Case, pool: Pool, batch: Batch, base: BaseExperts, *, rounds_all: bool
) -> Golden:
    """`terms_sq` of the result is the variance of the output for roundings of relative variance 1:
    those of the shrink outputs, of act, of the outputs of pairs, and of the sum over ranks; with
    `rounds_all` those of all else, too."""
    layer = Layer(case, base, batch, torch.float64, rounds_all=rounds_all)
    first, alone = layer.first(pool), layer.first(None)
    moved = layer.moved(pool, first, alone)
    noise = layer.weighted_sum(layer.noise(pool, first, moved), squares=True)
    base_alone, out, jump, of_ranks = (torch.zeros_like(noise) for _ in range(4))
    for columns in _parts(case.slices[0], case.tp):
        base_alone += layer.weighted_sum(layer.second(None, alone.act, columns))
        y = layer.second(pool.down, first.act, columns)
        out += layer.weighted_sum(y)
        noise += layer.weighted_sum(layer.outputs_rounded(first, y, columns), squares=True)
        if layer.is_quantised:
            jump += layer.weighted_sum(layer.largest_flip(first, moved, columns), squares=True)
        if case.tp * case.ep > 1:
            for held in layer.held_by_ranks():
                # the part of each rank, and the sum up to it: the last of many are far larger
                part = layer.weighted_sum(y * held)
                of_ranks += part
                noise += part.square() + of_ranks.square()
    # on a GPU the order of a sum may change from run to run: without this the delta of base rows
    # would be a population of noise
    served = (batch.token_slots >= 0).to(out.device)[:, None]
    return Golden(base_alone, torch.where(served, out - base_alone, 0.0), noise, jump)


def _eager_layer(case: Case, pool: Pool, batch: Batch, base: BaseExperts) -> Tensor:
    layer, dtype = Layer(case, base, batch, torch.float32), batch.x.dtype
    act = layer.first(pool).act.to(dtype).float()
    total: Tensor | None = None
    for columns in _parts(case.slices[0], case.tp):
        y = layer.second(pool.down, act, columns)
        # the output of a pair is rounded after it is multiplied by its weight
        y = layer.weighted(y).to(dtype).float()
        for held in layer.held_by_ranks():
            out = layer.added(y * held).to(dtype)
            total = out if total is None else total + out
    assert total is not None
    return total


def _parts(size: int, count: int) -> Iterator[slice]:
    """Slices as even as possible, the first ones larger."""
    start = 0
    for part in range(count):
        stop = start + size // count + (part < size % count)
        yield slice(start, stop)
        start = stop
