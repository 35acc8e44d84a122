"""One probe for each suspected problem of vLLM's dense LoRA, on its public operators.

Invariant: whatever a kernel may access by mistake lies in memory that the probe owns, so that a
probe shows a wrong number instead of an illegal access that ends the process.
"""

from __future__ import annotations

import gc
import weakref
from typing import Any

import torch
from torch import Tensor

from loragate.execution.graph import capture
from loragate.findings.ledger import Needs, Observation
from loragate.findings.probing import Probe, dense_probe, right_or_wrong, seen, values_of
from loragate.inputs.poison import marked_allocations
from loragate.subjects.vllm.package import VllmOps

_RANK, _IN, _WIDTH, _SLOTS, _ROWS = 16, 32, 32, 2, 4
_MARK = 7.0
_REPEATS = 40


def shrink_output_untouched(ops: VllmOps, device: str) -> Observation:
    a, _ = _factors(ops, device, slices=1)
    shrunk = torch.full((1, _ROWS, _RANK), _MARK, device=device)
    step = _step(ops, [-1] * _ROWS, device)
    ops.lora_shrink(_ones(_ROWS, _IN, device), a, shrunk, *step, 1.0)
    kept = int((shrunk == _MARK).sum())
    text = (
        f"{kept} of {shrunk.numel()} elements of the shrink output keep what they held before "
        "lora_shrink"
    )
    return seen(kept == shrunk.numel(), text)


def mapping_stale_after_base_step(ops: VllmOps, device: str) -> Observation:
    meta = _meta(ops, device)
    meta.prepare_tensors(_mapping([1, 1, 1, 1], device))
    meta.prepare_tensors(_mapping([-1, -1, -1, -1], device))
    left = meta.meta_args(4, False)[0].tolist()
    return seen(left != [-1] * 4, f"after a step of base rows alone the mapping reads {left}")


def mapping_tail_stale(ops: VllmOps, device: str) -> Observation:
    meta = _meta(ops, device)
    meta.prepare_tensors(_mapping([1, 1, 1, 1], device))
    meta.prepare_tensors(_mapping([0, 0], device))
    left = meta.meta_args(4, False)[0].tolist()
    return seen(left[2:] != [-1, -1], f"two live rows padded to four read {left}")


def mapping_uninitialised(ops: VllmOps, device: str) -> Observation:
    with marked_allocations():
        mapping = _meta(ops, device).meta_args(_ROWS, False)[0].tolist()
    filled = torch.iinfo(torch.int32).max
    text = f"before the first step the mapping reads {mapping} with empty() filled by a marker"
    return seen(mapping == [filled] * _ROWS, text)


def offset_start_ignored(ops: VllmOps, device: str) -> Observation:
    _, b = _factors(ops, device, slices=1)
    shrunk = torch.ones(1, _ROWS, _RANK, device=device)
    step = _step(ops, [0] * _ROWS, device)
    written = []
    for offset in (0, _WIDTH):
        out = torch.zeros(_ROWS, 2 * _WIDTH, dtype=torch.float16, device=device)
        ops.lora_expand(shrunk, b, out, *step, offset_start=offset, add_inputs=True)
        columns = out.any(dim=0).nonzero().flatten()
        written.append(int(columns[0]) if columns.numel() else -1)
    text = f"offset_start 0, then {_WIDTH}, on the same weights write from columns {written}"
    return seen(written == [0, 0], text)


def reused_address_keeps_strides(ops: VllmOps, device: str) -> Observation:
    size = _SLOTS * _WIDTH * _RANK
    storages = [torch.empty(size, dtype=torch.float16, device=device) for _ in range(2)]
    step = _step(ops, [1] * _ROWS, device)
    rank, smaller = _RANK, _RANK // 2
    ops.forget(storages, storages)
    large, small = (_pool_in(storages, ops, step, r) for r in (rank, smaller))
    ops.forget(storages, storages)
    text = (
        f"a pool of rank {smaller} at the addresses of one of rank {rank} gives {small} where "
        f"[{float(smaller)}] is right"
    )
    return seen(large == [float(rank)] and small != [float(smaller)], text)


def _pool_in(storages: list[Tensor], ops: VllmOps, step: tuple[Any, ...], rank: int) -> list[float]:
    """What lora_expand gives for two slices in `storages` whose slot 1 is all ones."""
    b = []
    for storage in storages:
        weight = storage.fill_(_MARK)[: _SLOTS * _WIDTH * rank].view(_SLOTS, 1, _WIDTH, rank)
        weight.zero_()[1] = 1
        b.append(weight)
    out = torch.zeros(_ROWS, 2 * _WIDTH, dtype=torch.float16, device=storages[0].device)
    shrunk = torch.ones(2, _ROWS, rank, device=out.device)
    ops.lora_expand(shrunk, b, out, *step, offset_start=0, add_inputs=True)
    return values_of(out)


def tables_keep_weights_alive(ops: VllmOps, device: str) -> Observation:
    a, b = _factors(ops, device, slices=1)
    step = _step(ops, [0] * _ROWS, device)
    shrunk = torch.empty(1, _ROWS, _RANK, device=device)
    out = torch.zeros(_ROWS, _WIDTH, dtype=torch.float16, device=device)
    ops.lora_shrink(_ones(_ROWS, _IN, device), a, shrunk, *step, 1.0)
    ops.lora_expand(shrunk, b, out, *step, offset_start=0, add_inputs=True)
    kept, key = weakref.ref(a[0]), (a[0].data_ptr(),)
    del a, b
    gc.collect()
    alive = kept() is not None
    ops.pointer_tables[0].pop(key, None)
    fate = "still alive" if alive else "freed"
    return seen(alive, f"A of a layer with one slice is {fate} after its last user released it")


def foreign_slot_reads_past_pool(ops: VllmOps, device: str) -> Observation:
    # the pool is the front of a larger tensor: what follows it is known and mapped
    storage = torch.zeros(_SLOTS + 1, 1, _WIDTH, _RANK, dtype=torch.float16, device=device)
    storage[_SLOTS] = 1
    b = [storage[:_SLOTS]]
    ops.forget(b, b)
    shrunk = torch.ones(1, _ROWS, _RANK, device=device)
    out = torch.zeros(_ROWS, _WIDTH, dtype=torch.float16, device=device)
    step = _step(ops, [_SLOTS] * _ROWS, device)
    ops.lora_expand(shrunk, b, out, *step, offset_start=0, add_inputs=True)
    ops.forget(b, b)
    text = f"slot {_SLOTS} of {_SLOTS} adds {values_of(out)} from beyond the pool"
    return seen(bool((out == _RANK).all()), text)


def slices_read_through_output_dtype(ops: VllmOps, device: str) -> Observation:
    step = _step(ops, [0] * _ROWS, device)
    right = []
    for slices in (1, 2):
        # twice the required size: that is how far the wrong pointer type reads
        storages = [
            torch.ones(2 * _SLOTS, 1, _WIDTH, _RANK, dtype=torch.float16, device=device)
            for _ in range(slices)
        ]
        b = [storage[:_SLOTS] for storage in storages]
        ops.forget(b, b)
        shrunk = torch.ones(slices, _ROWS, _RANK, device=device)
        out = torch.zeros(_ROWS, slices * _WIDTH, device=device)
        ops.lora_expand(shrunk, b, out, *step, offset_start=0, add_inputs=True)
        ops.forget(b, b)
        right.append(bool((out == _RANK).all()))
    text = (
        f"fp16 B into an fp32 output is {right_or_wrong(right[0])} for one slice and "
        f"{right_or_wrong(right[1])} for two"
    )
    return seen(right == [True, False], text)


def strided_input_refused(ops: VllmOps, device: str) -> Observation:
    a, _ = _factors(ops, device, slices=1)
    shrunk = torch.empty(1, _ROWS, _RANK, device=device)
    x = _ones(_ROWS, 2 * _IN, device)[:, :_IN]
    try:
        ops.lora_shrink(x, a, shrunk, *_step(ops, [0] * _ROWS, device), 1.0)
    except AssertionError as error:
        return seen(True, f"a column slice as input ends in an assertion saying {str(error)!r}")
    return seen(False, "a column slice as input is accepted")


def split_k_unstable(ops: VllmOps, device: str) -> Observation:
    rows, width = 16, 4096
    torch.manual_seed(0)
    x = torch.randn(rows, width, device=device).bfloat16()
    a = [torch.randn(1, 1, _RANK, width, device=device).bfloat16()]
    ops.forget(a, a)
    meta = ops.kernel_meta.make(1, rows, device)
    meta.prepare_tensors(_mapping([0] * rows, device))
    results = set()
    for _ in range(_REPEATS):
        shrunk = torch.empty(1, rows, _RANK, device=device)
        ops.lora_shrink(x, a, shrunk, *meta.meta_args(rows, False), 1.0)
        results.add(shrunk.view(torch.int32).cpu().numpy().tobytes())
    ops.forget(a, a)
    text = f"{_REPEATS} runs of one lora_shrink (16 x 4096, rank 16) give {len(results)} results"
    return seen(len(results) > 1, text)


def graph_of_base_step_stays_empty(ops: VllmOps, device: str) -> Observation:
    a, b = _factors(ops, device, slices=1)
    x, meta = _ones(_ROWS, _IN, device), _meta(ops, device)
    shrunk = torch.zeros(1, _ROWS, _RANK, device=device)
    out = torch.zeros(_ROWS, _WIDTH, dtype=torch.float16, device=device)

    def layer() -> None:
        out.zero_()
        step = meta.meta_args(_ROWS, False)
        ops.lora_shrink(x, a, shrunk, *step, 1.0)
        ops.lora_expand(shrunk, b, out, *step, offset_start=0, add_inputs=True)

    # compile, and fill the pointer tables, before anything is captured
    meta.prepare_tensors(_mapping([0] * _ROWS, device))
    layer()
    meta.prepare_tensors(_mapping([-1] * _ROWS, device))
    graph = capture(layer, warm_ups=0).graph
    meta.prepare_tensors(_mapping([0] * _ROWS, device))
    graph.replay()
    replayed = int(out.count_nonzero())
    layer()
    eager = int(out.count_nonzero())
    ops.forget(a, b)
    text = (
        f"captured with base rows, replayed with adapters: {replayed} of {out.numel()} outputs "
        f"get a delta, {eager} of them outside of the graph"
    )
    return seen(replayed == 0 and eager == out.numel(), text)


DENSE_PROBES: dict[str, Probe] = {
    "shrink-output-untouched": dense_probe(shrink_output_untouched),
    "mapping-stale-after-base-step": dense_probe(mapping_stale_after_base_step),
    "mapping-tail-stale": dense_probe(mapping_tail_stale),
    "mapping-uninitialised": dense_probe(mapping_uninitialised),
    "offset-start-ignored": dense_probe(offset_start_ignored),
    "reused-address-keeps-strides": dense_probe(reused_address_keeps_strides),
    "tables-keep-weights-alive": dense_probe(tables_keep_weights_alive),
    "foreign-slot-reads-past-pool": dense_probe(foreign_slot_reads_past_pool),
    "slices-read-through-output-dtype": dense_probe(slices_read_through_output_dtype),
    "strided-input-refused": dense_probe(strided_input_refused),
    "split-k-unstable": dense_probe(split_k_unstable, Needs.CUDA),
    "graph-of-base-step-stays-empty": dense_probe(graph_of_base_step_stays_empty, Needs.CUDA),
}


def _factors(ops: VllmOps, device: str, *, slices: int) -> tuple[list[Tensor], list[Tensor]]:
    """A and B of ones, unknown to the pointer tables."""
    a = [_weight(_RANK, _IN, device) for _ in range(slices)]
    b = [_weight(_WIDTH, _RANK, device) for _ in range(slices)]
    ops.forget(a, b)
    return a, b


def _weight(rows: int, columns: int, device: str) -> Tensor:
    return torch.ones(_SLOTS, 1, rows, columns, dtype=torch.float16, device=device)


def _ones(rows: int, columns: int, device: str) -> Tensor:
    return torch.ones(rows, columns, dtype=torch.float16, device=device)


def _mapping(slots: list[int], device: str) -> Tensor:
    return torch.tensor(slots, dtype=torch.int64, device=device)


def _meta(ops: VllmOps, device: str) -> Any:
    return ops.kernel_meta.make(_SLOTS, _ROWS, device)


def _step(ops: VllmOps, slots: list[int], device: str) -> tuple[Any, ...]:
    meta = _meta(ops, device)
    meta.prepare_tensors(_mapping(slots, device))
    arguments: tuple[Any, ...] = meta.meta_args(len(slots), False)
    return arguments
