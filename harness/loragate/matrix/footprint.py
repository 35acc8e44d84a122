"""Device memory that a case needs: an estimate from above. Pure.

Large tensors are drawn in pieces, so that what counts is how many copies of them, in their own
dtype, are alive at once: those of the harness, and those in the buffers of the subject. That
depends on the oracle. Oracles judge one after the other, so the one with most copies decides.
"""

from __future__ import annotations

from typing import NamedTuple

from loragate.core.verdict import OracleName
from loragate.matrix.case import LAYER_SITES, LINEAR_SITES, Case, Dtype, Quantisation, Sharing, Site

_ITEM = {Dtype.FP16: 2, Dtype.BF16: 2, Dtype.FP32: 4}
# a CUDA context, compiled kernels, a piece that is drawn, workspaces, memory between allocations
_FIXED = 3 << 29
# a tiny model, and the cache of an engine
_ENGINE = 8 << 30
# elements of a chunk of the reference, and bytes for each: golden, eager, errors, all in fp64
_CHUNK, _IN_CHUNK = 1 << 24, 160
# elements of the weights of experts that the reference gathers at a time, and bytes for each: the
# copy, in fp64, and its square; other sites take one slice of one slot at a time
_GATHERED, _IN_GATHERED = 1 << 25, 24
# bytes of each base weight of a linear layer: the right result has it in fp64, and a subject may
# have it in fp32
_IN_FP64, _IN_FP32 = 8, 4
# the same of a quantised MoE layer: the weights of both products in fp32, those of the first twice
_DEQUANTISED = 8


class _Tensors(NamedTuple):
    """A number for each kind of tensor: its elements, or its copies that are alive at once."""

    x: int
    out: int
    adapters: int
    weights: int


# measured on a CPU for cases of one large tensor each, with a margin of at least a tenth
_OTHERS = _Tensors(8, 10, 8, 5)
_COPIES = {
    OracleName.REFERENCE: _Tensors(3, 3, 3, 3),
    OracleName.EXACT: _Tensors(3, 7, 4, 3),
    OracleName.BASE_ROWS: _Tensors(4, 6, 3, 3),
    # eight steps, twice, and their results
    OracleName.QUEUE: _Tensors(20, 36, 4, 3),
}
# those that compute the right result
_WITH_GOLDEN = {OracleName.REFERENCE, OracleName.EXACT, OracleName.RANGE}


def footprint_bytes(case: Case) -> int:
    """Peak bytes of one run of a case with all its oracles, one after the other."""
    if case.site is Site.ENGINE:
        return _ENGINE
    return _FIXED + max(_bytes_of(case, oracle) for oracle in case.oracles)


def _bytes_of(case: Case, oracle: OracleName) -> int:
    """What one oracle needs beside what is fixed."""
    have, copies = _elements(case), _COPIES.get(oracle, _OTHERS)
    copied = sum(count * size for count, size in zip(copies, have, strict=True))
    if oracle in _WITH_GOLDEN:
        wide = _golden_bytes(case, have)
    else:
        wide = _IN_FP32 * have.weights if case.site in LINEAR_SITES else 0
    return copied * _ITEM[case.dtype] + wide


def _elements(case: Case) -> _Tensors:
    """Elements of all x, of all out, of a pool of adapters, and of the base layer."""
    if case.site is Site.MOE_LAYER:
        return _elements_of_layer(case)
    weights = case.in_features * case.out_features if case.site in LAYER_SITES else 0
    experts_of_a = 1 if case.sharing is Sharing.SHARED_A else case.experts
    experts_of_b = 1 if case.sharing is Sharing.SHARED_B else case.experts
    a = experts_of_a * len(case.slices) * case.in_features
    adapters = case.slots * case.rank * (a + experts_of_b * case.out_features)
    x, out = case.x_rows * case.x_columns, case.out_rows * case.out_features
    return _Tensors(x, out, adapters, weights)


def _elements_of_layer(case: Case) -> _Tensors:
    shared = 1 if case.sharing is Sharing.SHARED_OUTER else case.experts
    hidden, width, count = case.in_features, case.slices[0], len(case.slices)
    outer, inner = hidden * (count + 1) * shared, width * (count + 1) * case.experts
    weights = (count + 1) * case.experts * hidden * width
    # of each pair, act and the output stay in the dtype
    pairs = case.tokens * case.top_k * (hidden + width)
    x = case.tokens * hidden
    return _Tensors(x, x + pairs, case.slots * case.rank * (outer + inner), weights)


def _golden_bytes(case: Case, have: _Tensors) -> int:
    """Bytes of what the right result takes in fp64 and fp32."""
    widest = max(case.x_columns, case.out_features, sum(case.slices))
    chunk = min(case.tokens * case.top_k * widest, _CHUNK)
    factors = case.rank * max(case.in_features, *case.slices)
    if case.experts > 1:
        factors = min(max(have.adapters, have.weights), max(_GATHERED, factors))
    wide = _IN_FP64 if case.site in LINEAR_SITES else 0
    if case.quantisation is not Quantisation.NONE:
        wide = _DEQUANTISED
    return chunk * _IN_CHUNK + factors * _IN_GATHERED + wide * have.weights
