"""A complete engine, and the subject that has the gate judge it.

    PYTHONPATH=examples ./ci/gate --subject small_engine:SmallSubject \\
        --matrix examples/small_engine.yaml

The model is that of transformers; adapters are added by hand to the output of each linear layer, to
every row of a batch its own. It needs no GPU, keeps no keys and values, and computes each text from
its beginning for each new token. Start from this file for an engine of your own: docs/subjects.md
says what it is given and must give.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from loragate.core.machine import Machine
from loragate.engine.order import EngineOrder
from loragate.engine.requests import Completion, EngineCounts, Request
from loragate.matrix.case import Case, Dtype, Execution, Site
from loragate.matrix.engine_case import Active, Ends, Logprobs, Targets
from loragate.protocol import BaseLayer, Capabilities, Instance


class SmallSubject:
    name = "small"

    def version(self) -> str:
        return "0.1"

    def capabilities(self, machine: Machine) -> Capabilities | str:
        return Capabilities(
            sites=frozenset({Site.ENGINE}),
            # of all other axes the defaults: a dense model, no drafts, no graphs
            supports={
                "dtype": frozenset(Dtype),
                "execution": frozenset({Execution.EAGER}),
                "rank": range(1, 513),
                "active": frozenset(Active),
                "targets": frozenset(Targets) - {Targets.EXPERTS},
                "logprobs": frozenset(Logprobs),
                "ends": frozenset(Ends),
            },
        )

    def engine_target(self, case: Case) -> str:
        return "small_engine:SmallEngine"

    def open(self, case: Case, machine: Machine, base: BaseLayer | None) -> Instance:
        raise AssertionError("only engines are supported, and they have no instances")


@dataclass(frozen=True, slots=True)
class Factors:
    a: Tensor
    b: Tensor
    scale: float


class SmallEngine:
    def __init__(self, order: EngineOrder) -> None:
        # "auto": the checkpoint has the dtype of the case
        model = AutoModelForCausalLM.from_pretrained(order.model, dtype="auto")
        self._device = order.device
        self._model: Any = model.to(order.device).eval()
        self._adapters: dict[str | None, dict[str, Factors]] = {None: {}}
        # the adapter of each row of the batch that is served
        self._rows: list[dict[str, Factors]] = []
        self._launched = 0
        for name, module in self._model.named_modules():
            if isinstance(module, nn.Linear):
                module.register_forward_hook(partial(self._add_deltas, name))

    def load(self, name: str, folder: Path) -> None:
        config = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
        tensors = load_file(folder / "adapter_model.safetensors", device=self._device)
        found = {}
        for key, a in tensors.items():
            if key.endswith(".lora_A.weight"):
                module = key.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
                b = tensors[key.replace(".lora_A.", ".lora_B.")]
                found[module] = Factors(a, b, config["lora_alpha"] / config["r"])
        # whatever has this name is replaced
        self._adapters[name] = found

    def unload(self, name: str) -> None:
        del self._adapters[name]

    @torch.no_grad()
    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        self._rows = [self._adapters[request.adapter] for request in requests]
        texts = [list(request.prompt) for request in requests]
        logprobs: list[list[float]] = [[] for _ in requests]
        while not all(map(_is_over, texts, requests)):
            # what stands behind a token does not change what follows it
            longest = max(map(len, texts))
            padded = [text + [0] * (longest - len(text)) for text in texts]
            ids = torch.tensor(padded, device=self._device)
            logits = self._model(input_ids=ids, use_cache=False).logits
            for row, (text, request) in enumerate(zip(texts, requests, strict=True)):
                if not _is_over(text, request):
                    best = logits[row, len(text) - 1].float().log_softmax(-1).max(-1)
                    text.append(int(best.indices))
                    logprobs[row].append(float(best.values))
        return [
            Completion(tuple(text[len(r.prompt) :]), tuple(own))
            for text, own, r in zip(texts, logprobs, requests, strict=True)
        ]

    def counts(self) -> EngineCounts:
        # it drafts nothing, and has no graphs
        return EngineCounts(
            drafts_accepted=None,
            drafts_rejected=None,
            graphs_replayed=None,
            kernels_launched=self._launched,
        )

    def close(self) -> None:
        pass

    def _add_deltas(self, name: str, module: nn.Module, inputs: tuple[Tensor], out: Tensor) -> None:
        (x,) = inputs
        for row, adapter in enumerate(self._rows):
            if name in adapter:
                own = adapter[name]
                # factors are fp32 whatever the dtype of the model is
                delta = own.scale * (x[row].float() @ own.a.T @ own.b.T)
                out[row] += delta.to(out.dtype)
                self._launched += 1


def _is_over(text: Sequence[int], request: Request) -> bool:
    answer = text[len(request.prompt) :]
    return len(answer) == request.wanted(answer)
