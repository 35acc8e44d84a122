"""Representative launches of the MoE kernels, for compiling them without a GPU; see
dense/specs.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch

from lorakernels.moe.align.metadata import PairMetadata
from lorakernels.moe.align.ops import fill_tables
from lorakernels.moe.align.tables import PairTables
from lorakernels.moe.delta.launch import Delta, launch
from lorakernels.moe.delta.ops import MoEWorkspace, shape_of_batch, view_shrunk
from lorakernels.moe.delta.plan import MoEPath, plan_path
from lorakernels.moe.layer.launch import (
    Adapters,
    Product,
    launch_beside,
    launch_product,
    launch_sum,
)
from lorakernels.moe.layer.ops import Activation
from lorakernels.moe.weights import ExpertWeights

_SLOTS = 4


@dataclass(frozen=True, slots=True)
class Problem:
    label: str
    in_features: int
    slice_widths: tuple[int, ...]
    experts: int
    top_k: int
    tokens: int
    rank: int
    path: MoEPath | None = None
    dtype: torch.dtype = torch.bfloat16
    # w2: x by pair, router weights on the output, which is overwritten
    is_second: bool = False


# in features, slice widths, experts, top-k
Sizes = tuple[int, tuple[int, ...], int, int]
_W13 = (2048, (768, 768), 128, 8)
_W2 = (768, (2048,), 128, 8)
_WIDE = (4096, (7168, 7168), 8, 2)
_MANY = (2048, (512, 512), 1024, 8)
_ODD = (1000, (520, 72), 5, 3)
_ONE_FEATURE = (1024, (1, 1), 6, 1)


def _problems() -> Iterator[Problem]:
    for name, shape in (("w13", _W13), ("wide", _WIDE)):
        for tokens in (1, 64, 4096):
            for rank in (16, 64):
                yield Problem(f"{name}-r{rank}-t{tokens}", *shape, tokens, rank)
    # tiles of 16 and of 32 pairs that one warp sweeps
    for tokens in (256, 1024):
        yield Problem(f"w13-r16-t{tokens}", *_W13, tokens, 16)
    # groups of columns in tiles of 32 pairs
    yield Problem("wide-r16-t256", *_WIDE, 256, 16)
    for tokens in (1, 64, 256, 1024, 4096):
        yield Problem(f"w2-r16-t{tokens}", *_W2, tokens, 16, is_second=True)
    # both slices in one program, with more than 16 ranks
    yield Problem("w13-r24-t4096", *_W13, 4096, 24)
    for path in MoEPath:
        yield Problem(f"w2-r24-t64-{path.name.lower()}", *_W2, 64, 24, path)
    for tokens in (64, 4096):
        yield Problem(f"w2-r512-t{tokens}", *_W2, tokens, 512)
    yield Problem("w2-r128-t4096-one_shot", *_W2, 4096, 128, MoEPath.ONE_SHOT)
    for tokens in (33, 150):
        yield Problem(f"odd-r7-t{tokens}", *_ODD, tokens, 7, MoEPath.ONE_SHOT)
    # less to contract over than a tensor core takes
    for path in MoEPath:
        yield Problem(f"low-r1-t33-{path.name.lower()}", *_ODD, 33, 1, path)
    for path in MoEPath:
        label = f"odd-fp32-r24-t33-{path.name.lower()}"
        yield Problem(label, *_ODD, 33, 24, path, torch.float32)


def launches(compute_capability: int) -> Iterator[tuple[str, Callable[[], None]]]:
    """(label, launch) for a GPU, 90 for sm_90; `launch()` launches one or more kernels."""
    pdl = compute_capability >= 90
    for tokens, with_base in ((8, False), (64, True), (128, True), (8192, False), (8192, True)):
        label = f"align-t{tokens}{'-base' if with_base else ''}"
        yield label, partial(launch_align, tokens, with_base, pdl=pdl)
    yield "align-sorted", partial(launch_align, 1024, True, pdl=pdl, sizes=_MANY, slots=64)
    for tokens, with_base in ((5, False), (25, True), (100, False), (100, True)):
        label = f"align-many-t{tokens}{'-base' if with_base else ''}"
        yield label, partial(launch_align, tokens, with_base, pdl=pdl, sizes=_MANY, slots=64)
    for problem in _problems():
        yield f"moe-{problem.label}", partial(launch_delta, problem, pdl=pdl)
    for tokens in (8, 1024, 8192):
        for rank in (0, 16, 128):
            yield f"layer-r{rank}-t{tokens}", partial(launch_layer, tokens, rank, pdl=pdl)
    yield "layer-r4-t8", partial(launch_layer, 8, 4, pdl=pdl)
    yield "layer-fp32-r16-t8", partial(launch_layer, 8, 16, pdl=pdl, dtype=torch.float32)
    for tokens in (8, 1024):
        yield f"layer-beside-r16-t{tokens}", partial(launch_layer, tokens, 16, pdl=pdl, cut=True)
    gpt_oss = partial(launch_layer, activation=Activation.SWIGLU_OAI, biased=True, pdl=pdl)
    for tokens in (8, 1024):
        yield f"layer-gpt_oss-r16-t{tokens}", partial(gpt_oss, tokens, 16)
    yield "layer-gpt_oss-beside-r16-t8", partial(gpt_oss, 8, 16, cut=True)
    gelu = Activation.GELU_TANH_GATED
    yield "layer-gelu-r16-t8", partial(launch_layer, 8, 16, activation=gelu, pdl=pdl)
    # an argument of 1, which Triton makes a constant of
    one_feature = partial(launch_layer, 494, 16, pdl=pdl, sizes=_ONE_FEATURE)
    yield "layer-one_feature-r16-t494", one_feature


def launch_align(
    tokens: int, with_base: bool, *, pdl: bool, sizes: Sizes = _W13, slots: int = _SLOTS
) -> None:
    """Launch the alignment of a batch on tensors without data."""
    _, _, experts, top_k = sizes
    pairs = _pairs(tokens, top_k, experts, with_base=with_base, slots=slots)
    ids = torch.empty(tokens, top_k, dtype=torch.int32, device="meta")
    token_slots = torch.empty(tokens, dtype=torch.int32, device="meta")
    fill_tables(pairs, ids, token_slots, None, pdl=pdl)


def launch_delta(problem: Problem, *, pdl: bool) -> None:
    """Launch the delta of a problem on tensors without data."""
    weights = _weights(problem.slice_widths, problem.in_features, problem)
    pairs = _pairs(problem.tokens, problem.top_k, problem.experts, with_base=False)
    rows = problem.tokens * problem.top_k
    shape = shape_of_batch(weights, rows)
    path = plan_path(shape, problem.path)
    workspace = MoEWorkspace([weights], max_tokens=problem.tokens, top_k=problem.top_k)
    x_rows = rows if problem.is_second else problem.tokens
    shrunk = workspace.shrunk
    delta = Delta(
        shape=shape,
        x=torch.empty(x_rows, problem.in_features, dtype=problem.dtype, device="meta"),
        pairs_per_x=rows // x_rows,
        slots=weights.tensors,
        tables=pairs.tables,
        shrunk=view_shrunk(shrunk, shape) if path is MoEPath.TWO_KERNEL else shrunk,
        out=torch.empty(rows, sum(problem.slice_widths), dtype=problem.dtype, device="meta"),
        router_weights=torch.empty(rows, device="meta") if problem.is_second else None,
        add_inputs=not problem.is_second,
    )
    launch(delta, path, pdl=pdl)


def launch_layer(
    tokens: int,
    rank: int,
    *,
    pdl: bool,
    dtype: torch.dtype = torch.bfloat16,
    sizes: Sizes = _W13,
    cut: bool = False,
    activation: Activation = Activation.SILU_GATED,
    biased: bool = False,
) -> None:
    """Launch a layer with gate and up of one width on tensors without data; `cut`: with products
    that are cut before the expand."""
    hidden, (width, _), experts, top_k = sizes
    pairs, rows = _pairs(tokens, top_k, experts, with_base=True), tokens * top_k

    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    act, y = empty(rows, width), empty(rows, hidden)
    for x, x_rows, out, widths, between in (
        (hidden, tokens, act, (width, width), activation),
        (width, rows, y, (hidden,), None),
    ):
        lora = None
        if rank:
            problem = Problem("", x, widths, experts, top_k, tokens, rank, dtype=dtype)
            weights = _weights(widths, x, problem)
            shrunk = MoEWorkspace([weights], max_tokens=tokens, top_k=top_k).shrunk
            lora = Adapters(weights.tensors, shrunk)
        product = Product(
            x=empty(x_rows, x),
            w=empty(experts, sum(widths), x),
            bias=empty(experts, sum(widths)) if biased else None,
            out=out,
            pairs=pairs,
            lora_input=empty(x_rows, x),
            lora=lora,
            activation=between,
            router_weights=None if between else torch.empty(tokens, top_k, device="meta"),
        )
        _launch(product, pdl=pdl, cut=cut)
    launch_sum(y, pairs, empty(tokens, hidden), pdl=pdl)


def _launch(product: Product, *, pdl: bool, cut: bool) -> None:
    if cut:
        launch_beside(product, lambda: product)
    else:
        launch_product(product, pdl=pdl)


def _weights(widths: tuple[int, ...], in_features: int, problem: Problem) -> ExpertWeights:
    return ExpertWeights(
        num_slots=_SLOTS,
        num_experts=problem.experts,
        slice_widths=widths,
        in_features=in_features,
        rank=problem.rank,
        dtype=problem.dtype,
        device="meta",
    )


def _pairs(
    tokens: int, top_k: int, experts: int, *, with_base: bool, slots: int = _SLOTS
) -> PairTables:
    pairs = PairMetadata(
        max_tokens=tokens,
        top_k=top_k,
        num_experts=experts,
        max_slots=slots,
        device="meta",
        with_base=with_base,
    )
    return PairTables.of(pairs.buffers, tokens, pairs.sizes)
