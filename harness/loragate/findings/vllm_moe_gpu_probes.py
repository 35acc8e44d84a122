"""Probes of vLLM's MoE LoRA that need a GPU: its compiled alignment, and CUDA graphs.

Invariant: as in vllm_moe_probes.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from loragate.execution.graph import capture
from loragate.findings.ledger import Needs, Observation
from loragate.findings.probing import Probe, moe_probe, seen
from loragate.findings.vllm_moe_launch import BLOCK, Launch, Way
from loragate.inputs.poison import marked_allocations
from loragate.subjects.vllm.moe_package import VllmMoEOps

_RANK, _IN, _WIDTH, _SLOTS, _EXPERTS, _ROWS = 16, 32, 32, 2, 2, 4
_MANY_EXPERTS = (512, 992, 1024)
# with more than 64 the alignment takes two blocks for each slot
_EXPERTS_OF_TWO_BLOCKS = 128


def padding_uninitialised(ops: VllmMoEOps, device: str) -> Observation:
    launch = _launch(ops, device, _EXPERTS)
    with marked_allocations():
        *_, post_pad = launch.assign(_ids(device), Way.ONE_SHOT)
        lengths = post_pad.tolist()
    text = f"with rows of slot 0 alone the padded lengths are {lengths}, empty() filled by a marker"
    return seen(lengths[1] == torch.iinfo(torch.int32).max, text)


def many_experts_refused(ops: VllmMoEOps, device: str) -> Observation:
    outcomes = []
    for experts in _MANY_EXPERTS:
        launch = _launch(ops, device, experts)
        ids = torch.full((_ROWS, 1), experts - 1, dtype=torch.int32, device=device)
        try:
            _, sorted_ids, *_ = launch.assign(ids, Way.ONE_SHOT)
            placed = int((sorted_ids[0] < _ROWS).sum())
            outcomes.append((placed == _ROWS, f"{placed} of {_ROWS} pairs placed"))
        except RuntimeError as error:
            outcomes.append((False, repr(str(error).splitlines()[0])))
    results = ", ".join(
        f"{n}: {text}" for n, (_, text) in zip(_MANY_EXPERTS, outcomes, strict=True)
    )
    return seen(
        not all(right for right, _ in outcomes), f"alignment by number of experts: {results}"
    )


def graph_replays_stale_adapters(ops: VllmMoEOps, device: str) -> Observation:
    launch = _launch(ops, device, _EXPERTS)
    x = torch.ones(_ROWS, _IN, dtype=torch.float16, device=device)
    out = torch.zeros(_ROWS, 1, _WIDTH, dtype=torch.float16, device=device)
    ids = _ids(device)

    def layer() -> None:
        out.zero_()
        launch.run(Way.UNALIGNED, x, out, ids)

    layer()
    graph = capture(layer, warm_ups=0).graph
    launch.prepare([-1] * _ROWS)
    graph.replay()
    changed = int(out.flatten(0, 1).any(dim=1).sum())
    text = f"captured with adapters, replayed with base rows: {changed} of {_ROWS} rows get a delta"
    return seen(changed == _ROWS, text)


def adapter_lost_on_a_crowded_gpu(ops: VllmMoEOps, device: str) -> Observation:
    # imports Triton, which machines without a GPU may lack
    from loragate.execution.crowded import room_for_one_block

    launch, ids = _launch(ops, device, _EXPERTS_OF_TWO_BLOCKS), _ids(device)

    def length() -> int:
        *_, post_pad = launch.assign(ids, Way.ONE_SHOT)
        return int(post_pad[0])

    alone = length()
    with room_for_one_block(torch.device(device, torch.cuda.current_device())):
        crowded = length()
    text = (
        f"{_ROWS} pairs of slot 0, {_EXPERTS_OF_TWO_BLOCKS} experts: padded length {alone}, and "
        f"{crowded} where the GPU has room for one block at a time"
    )
    return seen((alone, crowded) == (BLOCK, 0), text)


MOE_GPU_PROBES: dict[str, Probe] = {
    "moe-padding-uninitialised": moe_probe(padding_uninitialised, Needs.CUDA),
    "moe-many-experts-refused": moe_probe(many_experts_refused, Needs.CUDA),
    "moe-adapter-lost-on-a-crowded-gpu": moe_probe(adapter_lost_on_a_crowded_gpu, Needs.CUDA),
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
