"""One probe for each suspected problem of vLLM's MoE LoRA that needs no GPU.

Invariant: whatever a kernel may access by mistake lies in memory that the probe owns, so that a
probe shows a wrong number instead of an illegal access that ends the process.
"""

from __future__ import annotations

import torch
from torch import Tensor

from loragate.findings.ledger import Observation
from loragate.findings.probing import Probe, moe_probe, seen, untouched, values_of
from loragate.findings.vllm_moe_launch import Launch, Way
from loragate.subjects.vllm.moe_package import VllmMoEOps

_RANK, _IN, _WIDTH, _SLOTS, _EXPERTS, _ROWS = 16, 32, 32, 2, 2, 4
_FAST = (Way.UNALIGNED, Way.ONE_SHOT)
# the delta of a row of ones with factors of ones
_RIGHT = [float(_IN * _RANK)]
_FAR = 1 << 30


def rank_above_128_refused(ops: VllmMoEOps, device: str) -> Observation:
    launch = _launch(ops, device, rank=256)
    try:
        launch.run(Way.ONE_SHOT, _rows(_IN, device), _out(device), _ids(device))
    except AssertionError as error:
        return seen(True, f"buffers of rank 256 end in an assertion saying {str(error)!r}")
    return seen(False, "buffers of rank 256 are accepted")


def two_kernel_must_add(ops: VllmMoEOps, device: str) -> Observation:
    launch = _launch(ops, device)
    x, ids = _rows(_IN, device), _ids(device)
    for way in _FAST:
        launch.run(way, x, _out(device), ids, add_inputs=False)
    try:
        launch.run(Way.TWO_KERNEL, x, _out(device), ids, add_inputs=False)
    except AssertionError as error:
        return seen(True, f"add_inputs=False with two kernels asserts, saying {str(error)!r}")
    return seen(False, "add_inputs=False is accepted on every path")


def offset_honoured_by_one_path(ops: VllmMoEOps, device: str) -> Observation:
    first = {}
    for way in Way:
        launch, out = _launch(ops, device), _out(device, 2 * _WIDTH)
        launch.run(way, _rows(_IN, device), out, _ids(device), offset=_WIDTH)
        first[way] = int(out.flatten(0, 1).any(dim=0).nonzero()[0])
    where = ", ".join(f"{column} {way.value}" for way, column in first.items())
    text = f"with offset {_WIDTH} the delta is written from column {where}"
    return seen(set(first.values()) == {0, _WIDTH}, text)


def two_kernel_computes_in_bf16(ops: VllmMoEOps, device: str) -> Observation:
    # a single product with an operand that bf16 cannot represent
    a, b = _factors(device, value=0.0)
    a[0][..., 0, 0], b[0][..., 0] = 1, 1
    x = torch.zeros_like(_rows(_IN, device))
    x[:, 0] = 1 + 2.0**-10
    found = {}
    for way in Way:
        out = _out(device)
        launch = Launch.of(ops, a, b, _ROWS)
        launch.prepare([0] * _ROWS)
        launch.run(way, x, out, _ids(device))
        found[way] = values_of(out)
    right = [1 + 2.0**-10]
    text = (
        f"fp16 {right} times 1 is {found[Way.TWO_KERNEL]} with two kernels, else {found[_FAST[0]]}"
    )
    return seen(found[Way.TWO_KERNEL] != right and all(found[way] == right for way in _FAST), text)


def few_pairs_round_elsewhere(ops: VllmMoEOps, device: str) -> Observation:
    # two ranks that cancel except for a part that bf16 cannot represent
    a, b = _factors(device, value=0.0, dtype=torch.bfloat16)
    a[0][..., 0, :2], a[0][..., 1, 0] = 1, 1
    b[0][..., 0], b[0][..., 1] = 1, -1
    x = torch.zeros(_ROWS, _IN, dtype=torch.bfloat16, device=device)
    x[:, 0], x[:, 1] = 1, 2.0**-10
    found = []
    for way in _FAST:
        out = _out(device, dtype=torch.bfloat16)
        launch = Launch.of(ops, a, b, _ROWS)
        launch.prepare([0] * _ROWS)
        launch.run(way, x, out, _ids(device))
        found.append(values_of(out))
    text = f"1 + 2**-10 in one rank less 1 in another is {found[0]} for few pairs, {found[1]} else"
    return seen(found == [[2.0**-10], [0.0]], text)


def base_step_keeps_adapters(ops: VllmMoEOps, device: str) -> Observation:
    changed = {}
    for way in _FAST:
        launch, out = _launch(ops, device), _out(device)
        # as in a graph replay: metadata is prepared, host code around the kernels does not run
        launch.prepare([-1] * _ROWS)
        launch.run(way, _rows(_IN, device), out, _ids(device))
        changed[way] = int(out.flatten(0, 1).any(dim=1).sum())
    counts = ", ".join(f"{count} {way.value}" for way, count in changed.items())
    text = f"a step of {_ROWS} base rows after one with adapters changes this many rows: {counts}"
    return seen(changed == {Way.UNALIGNED: _ROWS, Way.ONE_SHOT: 0}, text)


def rows_of_other_ranks_lose_adapters(ops: VllmMoEOps, device: str) -> Observation:
    # rows that a rank of data-parallel experts is handed come with the slots that they have
    of_rows = torch.zeros(_ROWS, dtype=torch.int32, device=device)
    found = {}
    for who, slot in (("base rows alone", -1), ("slot 1", 1), ("slot 0, too", 0)):
        launch, out = _launch(ops, device), _out(device)
        launch.prepare([slot] * _ROWS)
        launch.run_mapped(of_rows, _rows(_IN, device), out, _ids(device))
        found[who] = values_of(out)
    results = ", ".join(f"{values} on one that has {who}" for who, values in found.items())
    text = f"rows of slot 0 of another rank get {results}; {_RIGHT} is right"
    return seen([*found.values()] == [[0.0], [0.0], _RIGHT], text)


def weights_read_through_output_dtype(ops: VllmMoEOps, device: str) -> Observation:
    # twice the required size: that is how far the wrong pointer type reads
    a, b = _factors(device, slots=2 * _SLOTS)
    launch = Launch.of(ops, [a[0][:_SLOTS]], [b[0][:_SLOTS]], _ROWS)
    launch.prepare([0] * _ROWS)
    out = _out(device, dtype=torch.float32)
    launch.run(Way.TWO_KERNEL, _rows(_IN, device), out, _ids(device))
    text = f"fp16 weights into an fp32 output give {values_of(out)} where {_RIGHT} is right"
    return seen(values_of(out) != _RIGHT, text)


def narrow_slice_written_too_wide(ops: VllmMoEOps, device: str) -> Observation:
    # a base row follows the row that is written too far
    narrow = _WIDTH // 2
    wide, short = _factors(device), _factors(device, width=narrow)
    launch = Launch.of(ops, [wide[0][0], short[0][0]], [wide[1][0], short[1][0]], 2)
    launch.prepare([0, -1])
    out = torch.zeros(2, 1, _WIDTH + narrow, dtype=torch.float16, device=device)
    launch.run(Way.ONE_SHOT, _rows(_IN, device)[:2], out, _ids(device)[:2])
    changed = int(out[1].count_nonzero())
    text = f"slices of {_WIDTH} and {narrow} columns change {changed} columns of the next base row"
    return seen(changed > 0, text)


def strided_router_weights_misread(ops: VllmMoEOps, device: str) -> Observation:
    wide = torch.tensor([[1.0, 5.0]] * _ROWS, device=device)
    found = {}
    for way in Way:
        out = _out(device)
        _launch(ops, device).run(way, _rows(_IN, device), out, _ids(device), weights=wide[:, :1])
        found[way] = values_of(out)
    text = (
        f"router weights of 1, a column of a wider tensor, give {found[Way.ONE_SHOT]} "
        f"where {_RIGHT} is right"
    )
    return seen(all(values != _RIGHT for values in found.values()), text)


def foreign_expert_read(ops: VllmMoEOps, device: str) -> Observation:
    a, b = _factors(device)
    a[0][0] = 0
    launch, out = Launch.of(ops, a, b, _ROWS), _out(device)
    launch.prepare([0] * _ROWS)
    ids = torch.full_like(_ids(device), _EXPERTS)
    launch.run(Way.UNALIGNED, _rows(_IN, device), out, ids)
    text = f"expert {_EXPERTS} of {_EXPERTS} adds {values_of(out)}, the delta of the next slot"
    return seen(values_of(out) == _RIGHT, text)


def pair_offset_overflows(ops: VllmMoEOps, device: str) -> Observation:
    found, astray = {}, {}
    for way in Way:
        storage = untouched(4 * _FAR + _WIDTH, device)
        # rows lie 2**30 elements apart; the third begins at element 2**31 of them
        out = storage.as_strided((3, 1, _WIDTH), (_FAR, _FAR, 1), 2 * _FAR)
        launch = _launch(ops, device)
        launch.prepare([-1, -1, 0])
        launch.run(way, _rows(_IN, device)[:3], out, _ids(device)[:3])
        found[way], astray[way] = values_of(out[2]), values_of(storage[:_WIDTH])
    text = (
        f"a row beyond element 2**31 of the output gets {_by_path(found)} where {_RIGHT} is right; "
        f"2**32 elements before it is {_by_path(astray)}"
    )
    return seen(all(found[way] == [0.0] and astray[way] == _RIGHT for way in Way), text)


def slot_offset_overflows(ops: VllmMoEOps, device: str) -> Observation:
    found = {}
    for way in Way:
        storage = untouched(4 * _FAR + _EXPERTS * _RANK * _IN, device)
        shape, strides = (3, _EXPERTS, _RANK, _IN), (_FAR, _RANK * _IN, _IN, 1)
        a = storage.as_strided(shape, strides, 2 * _FAR)
        a[2] = 1
        b = torch.ones(3, _EXPERTS, _WIDTH, _RANK, dtype=torch.float16, device=device)
        launch, out = Launch.of(ops, [a], [b], _ROWS), _out(device)
        launch.prepare([2] * _ROWS)
        launch.run(way, _rows(_IN, device), out, _ids(device))
        found[way] = values_of(out)
    text = f"a slot beyond element 2**31 of A gives {_by_path(found)} where {_RIGHT} is right"
    return seen(all(values != _RIGHT for values in found.values()), text)


def _by_path(found: dict[Way, list[float]]) -> str:
    return ", ".join(f"{values} {way.value}" for way, values in found.items())


MOE_PROBES: dict[str, Probe] = {
    "moe-rank-above-128-refused": moe_probe(rank_above_128_refused),
    "moe-two-kernel-must-add": moe_probe(two_kernel_must_add),
    "moe-offset-honoured-by-one-path": moe_probe(offset_honoured_by_one_path),
    "moe-two-kernel-computes-in-bf16": moe_probe(two_kernel_computes_in_bf16),
    "moe-few-pairs-round-elsewhere": moe_probe(few_pairs_round_elsewhere),
    "moe-base-step-keeps-adapters": moe_probe(base_step_keeps_adapters),
    "moe-rows-of-other-ranks-lose-adapters": moe_probe(rows_of_other_ranks_lose_adapters),
    "moe-weights-read-through-output-dtype": moe_probe(weights_read_through_output_dtype),
    "moe-narrow-slice-written-too-wide": moe_probe(narrow_slice_written_too_wide),
    "moe-strided-router-weights-misread": moe_probe(strided_router_weights_misread),
    "moe-foreign-expert-read": moe_probe(foreign_expert_read),
    "moe-pair-offset-overflows": moe_probe(pair_offset_overflows, wild=True),
    "moe-slot-offset-overflows": moe_probe(slot_offset_overflows, wild=True),
}


def _factors(
    device: str,
    *,
    rank: int = _RANK,
    width: int = _WIDTH,
    slots: int = _SLOTS,
    value: float = 1.0,
    dtype: torch.dtype = torch.float16,
) -> tuple[list[Tensor], list[Tensor]]:
    """A and B of one slice, full of one value."""
    a = torch.full((slots, _EXPERTS, rank, _IN), value, dtype=dtype, device=device)
    b = torch.full((slots, _EXPERTS, width, rank), value, dtype=dtype, device=device)
    return [a], [b]


def _launch(ops: VllmMoEOps, device: str, *, rank: int = _RANK) -> Launch:
    """Factors of ones, every row with slot 0."""
    launch = Launch.of(ops, *_factors(device, rank=rank), _ROWS)
    launch.prepare([0] * _ROWS)
    return launch


def _rows(width: int, device: str) -> Tensor:
    return torch.ones(_ROWS, width, dtype=torch.float16, device=device)


def _ids(device: str) -> Tensor:
    """One expert for each row, the last one."""
    return torch.full((_ROWS, 1), _EXPERTS - 1, dtype=torch.int32, device=device)


def _out(device: str, width: int = _WIDTH, dtype: torch.dtype = torch.float16) -> Tensor:
    return torch.zeros(_ROWS, 1, width, dtype=dtype, device=device)
