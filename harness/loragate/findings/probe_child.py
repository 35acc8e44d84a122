"""Runs probes in this process: `python -m loragate.findings.probe_child RECORD NAME...`

Imports the package, and begins when a line comes in. Appends to RECORD what it does, one JSON
object a line, so that whoever waits knows which probe it was if this process dies. After an error
that the device does not recover from it ends, because nothing that follows would be evidence.
"""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path
from typing import Any


def main(record: Path, names: list[str]) -> int:
    from loragate.core.machine import detect_machine, select_interpreter

    # before anything with a kernel is imported
    select_interpreter()
    from loragate.findings.probing import Package
    from loragate.findings.vllm_probes import observe
    from loragate.subjects.vllm.layer_package import load_vllm_layers
    from loragate.subjects.vllm.moe_package import load_vllm_moe
    from loragate.subjects.vllm.package import load_vllm

    machine = detect_machine()
    ops = load_vllm(machine)
    if isinstance(ops, str):
        _append(record, refused=ops)
        return 0
    _append(record, version=ops.version)
    package = Package(ops, load_vllm_moe(machine), load_vllm_layers(machine))
    if not sys.stdin.readline():
        # whoever was to say so is gone
        return 1
    for name in names:
        _append(record, began=name)
        observation = observe(name, package, machine.device)
        _append(record, probe=name, seen=observation.seen.value, text=observation.text)
        if machine.device == "cuda" and not _device_answers():
            return 1
    return 0


def _device_answers() -> bool:
    import torch

    try:
        gc.collect()
        # probes need most of the memory, one after the other
        torch.cuda.empty_cache()
        return float(torch.ones(2, device="cuda").sum().item()) == 2.0
    except RuntimeError:
        return False


def _append(record: Path, **fact: Any) -> None:
    with record.open("a", encoding="utf-8") as file:
        file.write(json.dumps(fact) + "\n")


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
