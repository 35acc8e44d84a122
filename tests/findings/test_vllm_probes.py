from __future__ import annotations

import pytest

from loragate.findings.ledger import Needs, Seen
from loragate.findings.load import ledger_path, load_ledger
from loragate.findings.vllm_probes import PROBES, Probe, observe
from loragate.machine import detect_machine, select_interpreter
from loragate.subjects.vllm_package import VllmOps, load_vllm

select_interpreter()


def broken_package() -> VllmOps:
    def refuse(*arguments: object, **options: object) -> None:
        raise RuntimeError("no kernel image")

    return VllmOps(
        version="0",
        lora_shrink=refuse,
        lora_expand=refuse,
        kernel_meta=None,
        pointer_tables=({}, {}),
        batch_invariant=False,
    )


@pytest.mark.parametrize("name", [n for n, probe in PROBES.items() if probe.needs is Needs.ANY])
def test_a_probe_that_breaks_shows_nothing(name: str) -> None:
    seen = observe(name, broken_package(), "cpu")
    assert seen.seen is Seen.BROKEN
    assert seen.text.startswith(("RuntimeError: ", "AttributeError: "))


@pytest.mark.parametrize("name", [n for n, probe in PROBES.items() if probe.needs is Needs.CUDA])
def test_a_probe_that_needs_a_gpu_is_not_tried_without_one(name: str) -> None:
    assert observe(name, broken_package(), "cpu").text == "needs a GPU"


def test_the_listed_findings_reproduce_on_the_installed_vllm() -> None:
    machine = detect_machine()
    ops = load_vllm(machine)
    if isinstance(ops, str):
        pytest.skip(ops)
    for finding in load_ledger(ledger_path()):
        if finding.probe is None or not finding.covers(ops.version):
            continue
        probe: Probe = PROBES[finding.probe]
        if probe.needs is Needs.CUDA and machine.device != "cuda":
            continue
        seen = observe(finding.probe, ops, machine.device)
        assert seen.seen is Seen.REPRODUCED, f"{finding.id}: {seen.text}"
