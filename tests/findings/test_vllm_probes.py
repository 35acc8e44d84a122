from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from loragate.core.machine import detect_machine, select_interpreter
from loragate.findings.ledger import Needs, Seen
from loragate.findings.load import ledger_path, load_ledger
from loragate.findings.probing import Package, Probe
from loragate.findings.vllm_probes import PROBES, observe
from loragate.subjects.vllm.layer_package import load_vllm_layers
from loragate.subjects.vllm.moe_package import VllmMoEOps, load_vllm_moe
from loragate.subjects.vllm.package import VllmOps, load_vllm

select_interpreter()


ANYWHERE = [name for name, probe in PROBES.items() if probe.needs is Needs.ANY]
ON_A_GPU = [name for name, probe in PROBES.items() if probe.needs is Needs.CUDA]


def refuse(*arguments: object, **options: object) -> None:
    raise RuntimeError("no kernel image")


def broken_package() -> Package:
    dense = VllmOps(
        version="0",
        lora_shrink=refuse,
        lora_expand=refuse,
        kernel_meta=None,
        pointer_tables=({}, {}),
        batch_invariant=False,
    )
    moe = VllmMoEOps(version="0", wrapper=refuse, tiles=dict, fused_moe_lora=refuse, align=refuse)
    layers: Any = SimpleNamespace(rank_of_buffers=refuse)
    return Package(dense, moe, layers)


@pytest.mark.parametrize("name", ANYWHERE)
def test_a_probe_that_raises_is_broken_and_proves_nothing(name: str) -> None:
    seen = observe(name, broken_package(), "cpu")
    assert seen.seen is Seen.BROKEN
    assert seen.text.startswith(("RuntimeError: ", "AttributeError: "))


@pytest.mark.parametrize(
    ("lacking", "verdict"),
    [("einops", Seen.NOT_TRIED), ("vllm", Seen.BROKEN), ("vllm.lora.moved", Seen.BROKEN)],
)
def test_a_probe_is_not_tried_without_what_vllm_imports_and_broken_without_a_module_of_vllm(
    lacking: str, verdict: Seen
) -> None:
    def module(name: str) -> Any:
        raise ModuleNotFoundError(f"No module named '{lacking}'", name=lacking)

    layers: Any = SimpleNamespace(module=module)
    seen = observe("adapter-patterns-ignored", replace(broken_package(), layers=layers), "cpu")
    assert (seen.seen, seen.text) == (verdict, f"No module named '{lacking}'")


@pytest.mark.parametrize("name", ON_A_GPU)
def test_a_probe_that_needs_a_gpu_is_not_tried_without_one(name: str) -> None:
    assert observe(name, broken_package(), "cpu").text == "needs a GPU"


def test_moe_probes_are_not_tried_where_moe_lora_cannot_run() -> None:
    package = replace(broken_package(), moe="vLLM 0: no aiohttp")
    tried = [observe(name, package, "cpu") for name in ANYWHERE if name.startswith("moe-")]
    assert len(tried) > 5
    assert {(seen.seen, seen.text) for seen in tried} == {(Seen.NOT_TRIED, "vLLM 0: no aiohttp")}


def test_too_little_memory_counts_as_not_tried() -> None:
    def exhausted(*arguments: object, **options: object) -> None:
        raise MemoryError("8 GiB")

    moe = VllmMoEOps(
        version="0", wrapper=exhausted, tiles=dict, fused_moe_lora=refuse, align=refuse
    )
    seen = observe("moe-pair-offset-overflows", replace(broken_package(), moe=moe), "cpu")
    assert (seen.seen, seen.text) == (Seen.NOT_TRIED, "needs more memory: 8 GiB")


def test_the_listed_findings_reproduce_on_the_installed_vllm() -> None:
    machine = detect_machine()
    ops = load_vllm(machine)
    if isinstance(ops, str):
        pytest.skip(ops)
    package = Package(ops, load_vllm_moe(machine), load_vllm_layers(machine))
    for finding in load_ledger(ledger_path()):
        if finding.probe is None or not finding.covers(ops.version):
            continue
        probe: Probe = PROBES[finding.probe]
        if probe.needs is Needs.CUDA and machine.device != "cuda":
            continue
        seen = observe(finding.probe, package, machine.device)
        assert seen.seen is Seen.REPRODUCED, f"{finding.id}: {seen.text}"
