"""transformers and PEFT as an engine: one request after the other, each with its adapter."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor
from transformers import AutoModelForCausalLM

from loragate.engine.bisection import traced
from loragate.engine.order import EngineOrder
from loragate.engine.requests import Completion, EngineCounts, Request
from loragate.matrix.engine_case import Logprobs, Speculation

_NUM_DRAFTS = 3
# modules within experts and within what PEFT wraps
_PARTS = re.compile(r"\.(experts\.|base_layer|lora_)")


class TransformersEngine:
    """See loragate.engine.requests.Engine."""

    def __init__(self, order: EngineOrder) -> None:
        self._device, self._case = order.device, order.case
        self._model = _model(order.model, order.device)
        self._peft: Any = None
        self._assistant = None if order.drafts is None else _model(order.drafts, order.device)
        self._accepted = self._verified = 0
        self._model.register_forward_hook(self._note, with_kwargs=True)

    def load(self, name: str, folder: Path) -> None:
        if self._peft is None:
            self._peft = PeftModel.from_pretrained(self._model, folder, adapter_name=name)
            return
        if name in self._peft.peft_config:
            self._peft.delete_adapter(name)
        self._peft.load_adapter(folder, adapter_name=name)

    def unload(self, name: str) -> None:
        self._peft.delete_adapter(name)

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        return [self._answered(request) for request in requests]

    def counts(self) -> EngineCounts:
        drafts = self._case.speculation is not Speculation.NONE
        return EngineCounts(
            drafts_accepted=self._accepted if drafts else None,
            drafts_rejected=self._verified - self._accepted if drafts else None,
            graphs_replayed=None,
            kernels_launched=None,
            kernels_captured=None,
        )

    @torch.no_grad()
    def trace(self, tokens: Sequence[int], adapter: str | None) -> Mapping[str, Tensor]:
        ids = torch.tensor([list(tokens)], device=self._device)
        modules = {
            name: module
            for name, module in self._model.named_modules()
            if name and not _PARTS.search(name)
        }
        with self._speaking(adapter):
            return traced(modules, len(tokens), lambda: self._model(input_ids=ids))

    def close(self) -> None:
        pass

    @torch.no_grad()
    def _answered(self, request: Request) -> Completion:
        ids = torch.tensor([request.prompt], device=self._device)
        wants_logprobs = self._case.logprobs is Logprobs.ON
        with self._speaking(request.adapter):
            out = self._model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=request.new_tokens,
                **_ends(request),
                output_logits=wants_logprobs,
                return_dict_in_generate=True,
                **self._drafts(),
            )
        tokens = tuple(out.sequences[0, len(request.prompt) :].tolist())
        # the first pass has the prompt, and each gives a token beside the drafts that were right
        self._verified -= len(request.prompt) - 1
        self._accepted += len(tokens)
        return Completion(tokens, _logprobs(out.logits, tokens) if wants_logprobs else None)

    def _speaking(self, adapter: str | None) -> AbstractContextManager[None]:
        if adapter is not None:
            self._peft.set_adapter(adapter)
        elif self._peft is not None:
            disabled: AbstractContextManager[None] = self._peft.disable_adapter()
            return disabled
        return nullcontext()

    def _drafts(self) -> dict[str, Any]:
        if self._case.speculation is Speculation.NGRAM:
            return {"prompt_lookup_num_tokens": _NUM_DRAFTS}
        if self._assistant is None:
            return {}
        return {"assistant_model": self._assistant}

    def _note(self, model: Any, args: tuple[Any, ...], options: dict[str, Any], _: Any) -> None:
        """A pass over a token and the drafts behind it, or over a prompt."""
        self._verified += options["input_ids"].shape[1] - 1
        self._accepted -= 1


def _ends(request: Request) -> dict[str, Any]:
    """What keeps an answer up to its limit, or ends it before."""
    if not request.stop:
        return {"min_new_tokens": request.new_tokens}
    # of a single text, which is never padded
    return {"eos_token_id": [*request.stop], "pad_token_id": request.stop[0]}


def _logprobs(logits: Sequence[Tensor], tokens: Sequence[int]) -> tuple[float, ...]:
    """logits: [1, vocabulary] for each token."""
    own = zip(logits, tokens, strict=True)
    return tuple(float(place[0].float().log_softmax(-1)[token]) for place, token in own)


def _model(folder: Path, device: str) -> Any:
    options = {"local_files_only": True, "trust_remote_code": False, "use_safetensors": True}
    return AutoModelForCausalLM.from_pretrained(folder, dtype="auto", **options).to(device).eval()
