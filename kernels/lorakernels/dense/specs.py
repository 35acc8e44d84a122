"""Representative launches of the dense kernels, for compiling them without a GPU.

The host code runs as it does in a server, on tensors of device "meta", which have shapes and
strides, but no data. Every outcome of a plan should occur here once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch

from lorakernels.batch.metadata import BatchMetadata
from lorakernels.dense.embedding import shape_of_lookup
from lorakernels.dense.launch import (
    TileTables,
    launch_add,
    launch_expand,
    launch_lookup,
    launch_shrink,
)
from lorakernels.dense.ops import shape_of_batch
from lorakernels.dense.rank_shards import RankShardedSlots
from lorakernels.dense.sizes import plan_shrunk, stored_delta
from lorakernels.dense.weights import SlotWeights
from lorakernels.runtime.tuning import Tuning, tuning_of_family

_SLOTS = 4


@dataclass(frozen=True, slots=True)
class Problem:
    label: str
    in_features: int
    slice_widths: tuple[int, ...]
    tokens: int
    rank: int
    dtype: torch.dtype = torch.bfloat16
    # columns of a wider tensor, or rows of a transposed one
    row_stride: int | None = None
    transposed: bool = False
    # the shrink beside a base product, the expand behind both
    beside: bool = False
    # both beside a base product, their sum behind it
    stored: bool = False


# of a group of ranks over which adapters are sharded
_PARTS = 4
_QKV = ("qkv", 4096, (4096, 1024, 1024))
_GATE_UP = ("gate-up", 4096, (12288, 12288))
_DOWN = ("down", 12288, (4096,))


def _problems() -> Iterator[Problem]:
    for name, in_features, widths in (_QKV, _GATE_UP, _DOWN):
        for tokens in (1, 2048):
            for rank in (16, 64):
                label = f"{name}-bf16-r{rank}-t{tokens}"
                yield Problem(label, in_features, widths, tokens, rank)
    name, in_features, widths = _QKV
    for tokens in (64, 512):
        yield Problem(f"{name}-bf16-r16-t{tokens}", in_features, widths, tokens, 16)
    for rank in (1, 8, 128, 256, 320, 512):
        yield Problem(f"{name}-bf16-r{rank}-t512", in_features, widths, 512, rank)
    for rank, tokens in ((128, 256), (128, 2048), (128, 8192), (256, 256), (256, 2048)):
        yield Problem(f"{name}-bf16-r{rank}-t{tokens}", in_features, widths, tokens, rank)
    # wide ranks ask for the most shared memory and registers where a batch is small
    for tokens in (1, 2048):
        yield Problem(f"{name}-bf16-r512-t{tokens}", in_features, widths, tokens, 512)
    yield Problem("gate-up-bf16-r64-t256", 4096, (12288, 12288), 256, 64)
    # blocks that ask for most of the shared memory of a multiprocessor, where it is as large
    yield Problem("gate-up-bf16-r128-t2048", 4096, (12288, 12288), 2048, 128)
    yield Problem("qkv-fp16-r16-t64", in_features, widths, 64, 16, torch.float16)
    for rank, tokens in ((512, 1), (128, 512), (64, 2048), (256, 2048)):
        label = f"qkv-fp16-r{rank}-t{tokens}"
        yield Problem(label, in_features, widths, tokens, rank, torch.float16)
    yield Problem("qkv-fp32-r16-t64", in_features, widths, 64, 16, torch.float32)
    yield Problem("qkv-fp32-r512-t2048", in_features, widths, 2048, 512, torch.float32)
    yield Problem("odd-bf16-r24-t33", 1000, (520, 72), 33, 24)
    yield Problem("prime-bf16-r7-t33", 997, (509, 61), 33, 7)
    for rank in (16, 64):
        for tokens in (1, 64):
            label = f"beside-qkv-bf16-r{rank}-t{tokens}"
            yield Problem(label, in_features, widths, tokens, rank, beside=True)
    yield Problem("beside-down-bf16-r16-t1", *_DOWN[1:], 1, 16, beside=True)
    yield Problem("beside-down-fp16-r128-t64", *_DOWN[1:], 64, 128, torch.float16, beside=True)
    yield Problem("beside-gate-up-bf16-r16-t256", *_GATE_UP[1:], 256, 16, beside=True)
    for rank, tokens in ((16, 1), (64, 64), (128, 16)):
        label = f"stored-qkv-bf16-r{rank}-t{tokens}"
        yield Problem(label, in_features, widths, tokens, rank, stored=True)
    yield Problem("stored-down-fp16-r64-t5", *_DOWN[1:], 5, 64, torch.float16, stored=True)
    yield Problem("stored-odd-fp32-r24-t33", 1000, (520, 71), 33, 24, torch.float32, stored=True)
    yield Problem("columns-bf16-r16-t64", 4096, (4096,), 64, 16, row_stride=8191)
    yield Problem("transposed-bf16-r16-t64", 4096, (4096,), 64, 16, transposed=True)


def launches(compute_capability: int) -> Iterator[tuple[str, Callable[[], None]]]:
    """(label, launch) for a GPU, 90 for sm_90; `launch()` launches one or more kernels."""
    for slots, tokens in ((_SLOTS, 1), (64, 512), (_SLOTS, 8192)):
        yield f"prepare-s{slots}-t{tokens}", partial(_prepare, tokens, slots)
    pdl = compute_capability >= 90
    tuning = tuning_of_family(compute_capability // 10)
    for problem in _problems():
        yield problem.label, partial(_delta, problem, tuning, pdl=pdl)
    for tokens, rank, dtype in ((1, 16, torch.int64), (2048, 64, torch.int32)):
        label = f"embedding-r{rank}-t{tokens}"
        yield label, partial(_embedding, tokens, rank, dtype, pdl=pdl)
    for tokens in (1, 64, 2048):
        problem = Problem(f"sharded-qkv-bf16-r64-t{tokens}", *_QKV[1:], tokens, 64)
        yield problem.label, partial(_sharded, problem)


def _prepare(tokens: int, slots: int) -> None:
    metadata = BatchMetadata(max_tokens=tokens, max_slots=slots, device="meta")
    metadata.prepare(torch.empty(tokens, dtype=torch.int32, device="meta"))


def _delta(problem: Problem, tuning: Tuning, *, pdl: bool) -> None:
    weights = SlotWeights(
        num_slots=_SLOTS,
        slice_widths=problem.slice_widths,
        in_features=problem.in_features,
        rank=problem.rank,
        dtype=problem.dtype,
        device="meta",
    )
    metadata = BatchMetadata(max_tokens=problem.tokens, max_slots=_SLOTS, device="meta")
    x = _rows(problem, problem.in_features)
    out = _rows(problem, weights.out_features)
    shape, tiles = shape_of_batch(problem.tokens, weights), TileTables.of(metadata)
    shape = replace(shape, tuning=tuning, beside=problem.beside or problem.stored)
    shrunk = torch.empty(plan_shrunk(shape, _SLOTS), device="meta")
    launch_shrink(x, weights.tensors, shape, tiles, shrunk, pdl=pdl and not shape.beside)
    operands = (shrunk, weights.tensors, shape, tiles)
    if problem.stored:
        stored = torch.empty(stored_delta(shape), device="meta")
        launch_expand(*operands, stored, pdl=pdl, store=True)
        launch_add(stored, shape, tiles, out, pdl=pdl)
    else:
        launch_expand(*operands, out, pdl=pdl, behind_base=problem.beside)


def _embedding(tokens: int, rank: int, dtype: torch.dtype, *, pdl: bool) -> None:
    weights = SlotWeights(
        num_slots=_SLOTS,
        slice_widths=(4096,),
        in_features=151936,
        rank=rank,
        dtype=torch.bfloat16,
        device="meta",
    )
    metadata = BatchMetadata(max_tokens=tokens, max_slots=_SLOTS, device="meta")
    ids = torch.empty(tokens, dtype=dtype, device="meta")
    out = torch.empty(tokens, 4096, dtype=torch.bfloat16, device="meta")
    shape = shape_of_lookup(tokens, weights.a, weights.out_features)
    tiles = TileTables.of(metadata)
    shrunk = torch.empty(plan_shrunk(shape, _SLOTS), device="meta")
    launch_lookup(ids, weights.tensors, shape, tiles, shrunk, first_id=0, pdl=pdl)
    launch_expand(shrunk, weights.tensors, shape, tiles, out, pdl=pdl)


def _sharded(problem: Problem) -> None:
    weights = RankShardedSlots(
        num_slots=_SLOTS,
        slice_widths=problem.slice_widths,
        in_features=problem.in_features,
        rank=problem.rank,
        held=range(problem.rank // _PARTS),
        first_column=0,
        dtype=problem.dtype,
        device="meta",
    )
    metadata = BatchMetadata(max_tokens=problem.tokens, max_slots=_SLOTS, device="meta")
    x, out = _rows(problem, problem.in_features), _rows(problem, weights.out_features)
    shape, tiles = shape_of_batch(problem.tokens, weights), TileTables.of(metadata)
    splits, rows, ranks = plan_shrunk(shape, _SLOTS)
    shrunk = torch.empty(splits, rows, ranks, device="meta")
    launch_shrink(x, weights.tensors, shape, tiles, shrunk, pdl=False)
    exchanged = torch.empty(1, rows, _PARTS * ranks, device="meta")
    whole = replace(shape, rank=problem.rank)
    launch_expand(exchanged, weights.tensors, whole, tiles, out, pdl=False)


def _rows(problem: Problem, width: int) -> torch.Tensor:
    if problem.transposed:
        return torch.empty(width, problem.tokens, dtype=problem.dtype, device="meta").T
    stride = problem.row_stride or width
    return torch.empty(problem.tokens, stride, dtype=problem.dtype, device="meta")[:, :width]
