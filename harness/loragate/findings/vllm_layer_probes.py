"""Probes of vLLM's layers with adapters.

Invariant: as in vllm_dense_probes.py.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch

from loragate.core.machine import detect_machine
from loragate.execution.streams.model import modelled_streams
from loragate.findings.ledger import Observation
from loragate.findings.probing import Probe, layer_probe, seen
from loragate.inputs import DataKind, make_base
from loragate.matrix.case import Case, Dtype, Mix, Parallel, Site, Streams
from loragate.subjects.vllm.layer_package import VllmLayers
from loragate.subjects.vllm.lora_linear import VllmLoRALinear

_ROWS, _IN, _WIDTH = 4, 32, 24


def dual_stream_counts_second_dimension(layers: VllmLayers, device: str) -> Observation:
    machine = detect_machine()
    outcomes = {}
    for streams in Streams:
        case = Case(
            site=Site.LORA_LINEAR,
            tokens=_ROWS,
            in_features=_IN,
            slices=(_WIDTH,),
            rank=8,
            slots=2,
            dtype=Dtype.FP16,
            mix=Mix.ALL_BASE,
            parallel=Parallel.COLUMN,
            streams=streams,
        )
        base = make_base(case, 0, DataKind.SIGNED, machine)
        with modelled_streams() if machine.interpreted else nullcontext():
            instance = VllmLoRALinear(layers, case, device, base)
            # no row beyond those that the delta has room for has an adapter
            instance.prepare(torch.tensor([0, 1, -1, -1], dtype=torch.int32))
            x = torch.ones(2, _ROWS // 2, _IN, dtype=torch.float16, device=device)
            outcomes[streams] = _outcome(instance, x)
    text = ", ".join(f"{streams}: {outcome}" for streams, outcome in outcomes.items())
    is_refused = outcomes[Streams.DUAL].startswith("RuntimeError")
    return seen(is_refused, f"x of [2, 2, {_IN}] - {text}")


def _outcome(instance: VllmLoRALinear, x: torch.Tensor) -> str:
    try:
        return f"out of {list(instance.call(x).shape)}"
    except RuntimeError as error:
        return f"RuntimeError saying {str(error).splitlines()[0]!r}"


LAYER_PROBES: dict[str, Probe] = {
    "dual-stream-counts-second-dimension": layer_probe(dual_stream_counts_second_dimension),
}
