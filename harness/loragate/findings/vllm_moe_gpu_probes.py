"""Suspicions of vLLM's LoRA of experts that need a GPU: its compiled alignment, and graphs.

Invariant: as in vllm_moe_probes.py.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from loragate.findings.ledger import Needs, Observation
from loragate.findings.probing import Probe, moe_probe, seen
from loragate.findings.vllm_moe_launch import BLOCK, Launch, Way
from loragate.subjects.vllm_moe_package import VllmMoEOps

_RANK, _IN, _WIDTH, _SLOTS, _EXPERTS, _ROWS = 16, 32, 32, 2, 2, 4
_MANY_EXPERTS = (512, 992, 1024)


def padding_uninitialised(ops: VllmMoEOps, device: str) -> Observation:
    launch = _launch(ops, device, _EXPERTS)
    # torch's own switch that makes the content of empty() visible
    memory: Any = torch.utils.deterministic
    fill, strict = memory.fill_uninitialized_memory, torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    memory.fill_uninitialized_memory = True
    try:
        *_, post_pad = launch.assign(_ids(device), Way.ONE_SHOT)
        lengths = post_pad.tolist()
    finally:
        memory.fill_uninitialized_memory = fill
        torch.use_deterministic_algorithms(strict)
    text = f"with rows of slot 0 alone the padded lengths are {lengths}, empty() filled with a mark"
    return seen(lengths[1] == torch.iinfo(torch.int32).max, text)


def negative_id_reads_before_map(ops: VllmMoEOps, device: str) -> Observation:
    # the word before the map is known: it says expert 0
    storage = torch.tensor([0, *[-1] * 128], dtype=torch.int32, device=device)
    ids = torch.full((_ROWS, 1), -1, dtype=torch.int32, device=device)
    sorted_ids = _align(ops, ids, storage[1:])
    found = sorted(pair for pair in sorted_ids.tolist() if pair < _ROWS)
    text = f"of {_ROWS} pairs without an expert (-1), {len(found)} are given to expert 0"
    return seen(len(found) == _ROWS, text)


def _align(ops: VllmMoEOps, ids: Tensor, expert_map: Tensor) -> Tensor:
    """The sorted pairs of slot 0, of a layer whose experts are all elsewhere."""
    wrapper = ops.make_wrapper(max_tokens=_ROWS, max_slots=1, device=ids.device.type)
    wrapper.token_mapping_meta.prepare_tensors(torch.zeros(_ROWS, dtype=torch.int64).to(ids.device))
    enabled = torch.ones(2, dtype=torch.int32, device=ids.device)
    _, sorted_ids, *_ = wrapper.moe_lora_align_block_size(
        ids, _ROWS, BLOCK, _EXPERTS, 1, enabled, expert_map
    )
    assert isinstance(sorted_ids, Tensor)
    return sorted_ids


def many_experts_refused(ops: VllmMoEOps, device: str) -> Observation:
    fates = []
    for experts in _MANY_EXPERTS:
        launch = _launch(ops, device, experts)
        ids = torch.full((_ROWS, 1), experts - 1, dtype=torch.int32, device=device)
        try:
            _, sorted_ids, *_ = launch.assign(ids, Way.ONE_SHOT)
            placed = int((sorted_ids[0] < _ROWS).sum())
            fates.append((placed == _ROWS, f"{placed} of {_ROWS} pairs placed"))
        except RuntimeError as error:
            fates.append((False, repr(str(error).splitlines()[0])))
    told = ", ".join(f"{n}: {text}" for n, (_, text) in zip(_MANY_EXPERTS, fates, strict=True))
    return seen(not all(right for right, _ in fates), f"alignment for so many experts: {told}")


def two_kernel_cannot_compile_low_rank(ops: VllmMoEOps, device: str) -> Observation:
    rank = 4
    tiles = ops.tiles(
        op_type="fused_moe_lora_w13_shrink",
        w1_shape=(_EXPERTS, _WIDTH, _IN),
        w2_shape=(_EXPERTS, _IN, _WIDTH),
        rank=rank,
        top_k=1,
        dtype=None,
        M=_ROWS,
    )
    launch = _launch(ops, device, _EXPERTS, rank)
    x = torch.ones(_ROWS, _IN, dtype=torch.float16, device=device)
    out = torch.zeros(_ROWS, 1, _WIDTH, dtype=torch.float16, device=device)
    width = int(tiles["BLOCK_SIZE_N"] or 0)
    try:
        launch.run(Way.TWO_KERNEL, x, out, _ids(device), shrink_block_n=width)
    except Exception as error:
        # the compiler's errors have no type in common
        head = f"{type(error).__name__}: {str(error).strip().splitlines()[-1]}"
        return seen(True, f"rank {rank} has a tile {width} wide, which does not compile: {head}")
    return seen(False, f"rank {rank} has a tile {width} wide, which compiles")


def graph_replays_stale_adapters(ops: VllmMoEOps, device: str) -> Observation:
    launch = _launch(ops, device, _EXPERTS)
    x = torch.ones(_ROWS, _IN, dtype=torch.float16, device=device)
    out = torch.zeros(_ROWS, 1, _WIDTH, dtype=torch.float16, device=device)
    ids = _ids(device)

    def layer() -> None:
        out.zero_()
        launch.run(Way.UNALIGNED, x, out, ids)

    layer()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layer()
    launch.prepare([-1] * _ROWS)
    graph.replay()
    changed = int(out.flatten(0, 1).any(dim=1).sum())
    text = f"captured with adapters, replayed with base rows: {changed} of {_ROWS} rows get a delta"
    return seen(changed == _ROWS, text)


MOE_GPU_PROBES: dict[str, Probe] = {
    "moe-padding-uninitialised": moe_probe(padding_uninitialised, Needs.CUDA),
    "moe-negative-id-reads-before-map": moe_probe(negative_id_reads_before_map, Needs.CUDA),
    "moe-many-experts-refused": moe_probe(many_experts_refused, Needs.CUDA),
    "moe-low-rank-does-not-compile": moe_probe(two_kernel_cannot_compile_low_rank, Needs.CUDA),
    "moe-graph-replays-stale-adapters": moe_probe(graph_replays_stale_adapters, Needs.CUDA),
}


def _launch(ops: VllmMoEOps, device: str, experts: int, rank: int = _RANK) -> Launch:
    """Factors of ones, every row with slot 0."""
    a = torch.ones(_SLOTS, experts, rank, _IN, dtype=torch.float16, device=device)
    b = torch.ones(_SLOTS, experts, _WIDTH, rank, dtype=torch.float16, device=device)
    launch = Launch.of(ops, [a], [b], _ROWS)
    launch.prepare([0] * _ROWS)
    return launch


def _ids(device: str) -> Tensor:
    return torch.zeros(_ROWS, 1, dtype=torch.int32, device=device)
