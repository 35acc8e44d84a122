"""Device memory that a case needs: a rough estimate from above. Pure."""

from __future__ import annotations

from loragate.matrix.case import LAYER_SITES, Case, Dtype, Sharing, Site

_ITEM = {Dtype.FP16: 2, Dtype.BF16: 2, Dtype.FP32: 4}
# a matrix of rows is drawn in fp32, and up to four copies of it in its own dtype are alive
_DRAWN, _COPIES = 8, 4
# signs of adapters are drawn as int64; copies are in the pool and in the subject's buffers
_ADAPTER_DRAWN, _ADAPTER_COPIES = 20, 3
# fp64 chunks of the reference, compiled kernels, a CUDA context
_FIXED = 1 << 30
# a tiny model, and the cache of an engine
_ENGINE = 8 << 30
# elements of a chunk of an MoE layer, and bytes for each: gate, up, act, outputs, variances
_CHUNK, _BETWEEN = 1 << 24, 16 * 8


def footprint_bytes(case: Case) -> int:
    """Peak bytes of one run of a case with all its oracles, one after the other."""
    if case.site is Site.ENGINE:
        return _ENGINE
    if case.site is Site.MOE_LAYER:
        return _layer_bytes(case)
    item = _ITEM[case.dtype]
    rows = case.x_rows * case.x_columns + case.out_rows * case.out_features
    if case.site in LAYER_SITES:
        rows += case.in_features * case.out_features
    experts_of_a = 1 if case.sharing is Sharing.SHARED_A else case.experts
    experts_of_b = 1 if case.sharing is Sharing.SHARED_B else case.experts
    a = experts_of_a * len(case.slices) * case.in_features
    adapters = case.slots * case.rank * (a + experts_of_b * case.out_features)
    return (
        _FIXED
        + rows * (_DRAWN + _COPIES * item)
        + adapters * (_ADAPTER_DRAWN + _ADAPTER_COPIES * item)
    )


def _layer_bytes(case: Case) -> int:
    """Base weights are drawn in fp32, one product after the other; copies are in the harness and in
    the ranks of the subject, two of each for an oracle that reorders experts."""
    item = _ITEM[case.dtype]
    shared = 1 if case.sharing is Sharing.SHARED_OUTER else case.experts
    hidden, width, count = case.in_features, case.slices[0], len(case.slices)
    outer, inner = hidden * (count + 1) * shared, width * (count + 1) * case.experts
    adapters = case.slots * case.rank * (outer + inner)
    weights = (count + 1) * case.experts * hidden * width
    # intermediate values of the reference for each token-expert pair, in fp64
    between = min(case.tokens * case.top_k * max(hidden, count * width), _CHUNK)
    # of each pair, act and the output stay in the dtype
    rows = 2 * case.tokens * hidden + case.tokens * case.top_k * (hidden + width)
    return (
        _FIXED
        + rows * (_DRAWN + _COPIES * item)
        + adapters * (_ADAPTER_DRAWN + _ADAPTER_COPIES * item)
        + weights * (_DRAWN + _COPIES * item)
        + between * _BETWEEN
    )
