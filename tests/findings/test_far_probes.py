"""The probes of 32-bit offsets, on operators in plain torch that compute offsets so, or rightly."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from loragate.findings import vllm_probes
from loragate.findings.ledger import Observation, Seen
from loragate.findings.probing import Package
from loragate.findings.vllm_far_probes import (
    row_offset_overflows,
    row_offset_overwrites_base_rows,
    slot_offset_overflows,
)
from loragate.findings.vllm_probes import PROBES, observe
from loragate.subjects.vllm.package import VllmOps

_FAKE = Path(__file__).parents[1] / "fake_vllm" / "vllm" / "lora" / "ops" / "triton_ops"
# what each probe says where offsets of rows and slots have 32 bits
WRAPPED = {
    row_offset_overflows: (
        "for rows beyond element 2**31, lora_shrink gives [0.0] where [4096.0] is right and "
        "lora_expand gives [0.0] where [16.0] is right"
    ),
    row_offset_overwrites_base_rows: (
        "the last 16 of 65552 rows of 32768 columns get [0.0] where [8.0] is right, and 16 rows of "
        "another tensor, 4 GiB before the first, get [8.0] where [0.0] is right; of 131088 rows "
        "the last 16 get [0.0], and the first 16, base rows, get [8.0]"
    ),
    slot_offset_overflows: (
        "the last of 129 slots of rank 512 and 32768 columns gives [65536.0] where [32768.0] is "
        "right; [65536.0] is what lies 4 GiB before A"
    ),
}


def operators(*faults: str) -> VllmOps:
    spec = importlib.util.spec_from_file_location("fake_triton_ops", _FAKE / "__init__.py")
    assert spec is not None
    assert spec.loader is not None
    ops: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(ops)
    ops.faults = set(faults)
    return VllmOps(
        version="0.26.0",
        lora_shrink=ops.lora_shrink,
        lora_expand=ops.lora_expand,
        kernel_meta=ops.LoRAKernelMeta,
        pointer_tables=({}, {}),
        batch_invariant=True,
    )


@pytest.mark.parametrize("probe", WRAPPED)
def test_operators_with_offsets_of_32_bits_show_the_finding_and_where_it_went(probe: Any) -> None:
    assert probe(operators("wrap"), "cpu") == Observation(Seen.REPRODUCED, WRAPPED[probe])


@pytest.mark.parametrize("probe", WRAPPED)
def test_operators_with_offsets_of_64_bits_do_not_show_it(probe: Any) -> None:
    seen = probe(operators(), "cpu")
    assert seen.seen is Seen.ABSENT, seen.text


def test_a_probe_that_needs_more_memory_than_is_free_is_not_tried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(vllm_probes.torch.cuda, "mem_get_info", lambda: (5 << 30, 140 << 30))
    package = Package(operators("wrap"), "no MoE", "no layers")
    for name, probe in PROBES.items():
        if probe.free_gib:
            seen = observe(name, package, "cuda")
            text = f"needs {probe.free_gib} GiB of free GPU memory, 5.0 GiB are free"
            assert (seen.seen, seen.text) == (Seen.NOT_TRIED, text)
