"""Device memory that a case needs: an estimate from above. Pure.

Large tensors are drawn in pieces, so that what counts is how many copies of them, in their own
dtype, are alive at once: those of the harness, and those in the buffers of the subject. That
depends on the oracle. Oracles judge one after the other, so the one with most copies decides.
"""

from __future__ import annotations

from typing import NamedTuple

from loragate.core.verdict import OracleName
from loragate.matrix.case import (
    LAYER_SITES,
    LINEAR_SITES,
    Case,
    Dtype,
    Parallel,
    Placement,
    Quantisation,
    Sharing,
    Site,
)

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
# copies of what each rank adds to a sum over ranks: its own, and that from which the sum is taken
_PARTIAL = 2
# bytes of each base weight of a linear layer: the right result has it in fp64, and a subject may
# have it in fp32
_IN_FP64, _IN_FP32 = 8, 4
# the same of a quantised MoE layer: the weights of both products in fp32, those of the first twice
_DEQUANTISED = 8


class _Tensors(NamedTuple):
    """A number for each kind of tensor: its elements, or its copies that are alive at once.

    `again`: what the second and later ranks of one instance have beside their part: the factors
    that a layer does not cut, and outputs that are summed over ranks. Its copies are the instances
    that are alive at once.
    """

    x: int
    out: int
    adapters: int
    weights: int
    again: int


# measured on a CPU for cases of one large tensor each, with a margin of at least a tenth
_OTHERS = _Tensors(8, 13, 8, 6, 2)
_COPIES = {
    OracleName.REFERENCE: _Tensors(3, 3, 3, 3, 1),
    OracleName.EXACT: _Tensors(3, 7, 4, 3, 1),
    OracleName.BASE_ROWS: _Tensors(4, 8, 5, 4, 1),
    # a layer of other weights beside the one under test
    OracleName.SEQUENCE: _OTHERS._replace(weights=7),
    # counted from its code, for it needs a GPU: x of eight batches and of a round's copies of them;
    # out of both where a site adds to it, what was wanted, and the results of two rounds
    OracleName.QUEUE: _Tensors(20, 44, 4, 3, 2),
}
# those that compute the right result
_WITH_GOLDEN = {OracleName.REFERENCE, OracleName.EXACT, OracleName.RANGE}


def footprint_bytes(case: Case) -> int:
    """Peak bytes of one run of a case with all its oracles, one after the other."""
    if case.site is Site.ENGINE:
        return _ENGINE
    return _FIXED + max((_bytes_of(case, oracle) for oracle in case.oracles), default=0)


def _bytes_of(case: Case, oracle: OracleName) -> int:
    """What one oracle needs beside what is fixed."""
    have, copies = _elements(case), _COPIES.get(oracle, _OTHERS)
    copied = sum(count * size for count, size in zip(copies, have, strict=True))
    wide = _wide_bytes(case, have, with_golden=oracle in _WITH_GOLDEN)
    # an instance has buffers of its own, as large as it may need
    spare = case.spare_rows * case.top_k * (case.x_columns + case.out_features)
    return (copied + spare) * _ITEM[case.dtype] + wide


def _elements(case: Case) -> _Tensors:
    """Elements of all x, of all out, of a pool of adapters, and of the base layer."""
    if case.site is Site.MOE_LAYER:
        return _elements_of_layer(case)
    weights = case.in_features * case.out_features if case.site in LAYER_SITES else 0
    experts_of_a = 1 if case.sharing is Sharing.SHARED_A else case.experts
    experts_of_b = 1 if case.sharing is Sharing.SHARED_B else case.experts
    in_slot = case.slots * case.rank
    a = in_slot * experts_of_a * len(case.slices) * case.in_features
    b = in_slot * experts_of_b * case.out_features
    x, out = case.x_rows * case.x_columns, case.out_rows * case.out_features
    cuts_a = case.site is Site.EMBEDDING or case.parallel is Parallel.ROW
    return _Tensors(x, out, a + b, weights, (case.tp - 1) * (b + _PARTIAL * out if cuts_a else a))


def _elements_of_layer(case: Case) -> _Tensors:
    is_shared = case.sharing is Sharing.SHARED_OUTER
    # each of the ranks holds an expert of another one as well, and the last rank one twice
    held = case.experts + (case.ep + 1 if case.placement is Placement.REPLICATED else 0)
    hidden, width, count = case.in_features, case.slices[0], len(case.slices)
    in_slot = case.slots * case.rank * (count + 1)
    outer, inner = in_slot * hidden * (1 if is_shared else held), in_slot * width * held
    weights = (count + 1) * held * hidden * width
    # of each pair, act and the output stay in the dtype
    pairs = case.tokens * case.top_k * (hidden + width)
    x = case.tokens * hidden
    again = (case.tp * (case.ep if is_shared else 1) - 1) * outer
    again += (case.tp * case.ep - 1) * _PARTIAL * x
    return _Tensors(x, x + pairs, outer + inner, weights, again)


def _wide_bytes(case: Case, have: _Tensors, *, with_golden: bool) -> int:
    """Bytes of what is in fp32 and fp64 beside the tensors in the dtype of the case."""
    if case.quantisation is not Quantisation.NONE:
        of_weight = _DEQUANTISED
    elif case.site in LINEAR_SITES:
        of_weight = _IN_FP64 if with_golden else _IN_FP32
    else:
        of_weight = 0
    return of_weight * have.weights + (_golden_bytes(case, have) if with_golden else 0)


def _golden_bytes(case: Case, have: _Tensors) -> int:
    """Bytes of what the right result takes in fp64 for a chunk of rows and a few factors."""
    widest = max(case.x_columns, case.out_features, sum(case.slices))
    chunk = min(case.tokens * case.top_k * widest, _CHUNK)
    factors = case.rank * max(case.in_features, *case.slices)
    if case.experts > 1:
        factors = min(max(have.adapters, have.weights), max(_GATHERED, factors))
    return chunk * _IN_CHUNK + factors * _IN_GATHERED
