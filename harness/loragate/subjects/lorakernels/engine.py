"""lorakernels.serving as an engine: a decoder, its drafts and its graphs, as a case asks for them.

More adapters than there are slots are served in waves, each of which uses no more than the slots:
those that are not used make room.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import AutoModelForCausalLM, GenerationConfig

from loragate.engine.bisection import traced
from loragate.engine.launch_counts import LaunchCounts
from loragate.engine.order import EngineOrder
from loragate.engine.requests import Completion, EngineCounts, Request
from loragate.matrix.engine_case import Graphs, Logprobs, Speculation
from lorakernels.adapters.adapter import Adapter
from lorakernels.adapters.peft_folder import read_peft_folder
from lorakernels.runtime import interpreter
from lorakernels.serving.decoder import Decoder
from lorakernels.serving.generation import Generation
from lorakernels.serving.generation import Request as Served
from lorakernels.serving.projections import Columns, ServedExperts
from lorakernels.serving.speculation import DraftCounts, Drafter, ModelDrafts, NgramDrafts

_NUM_DRAFTS = 3


class ServingEngine:
    """See loragate.engine.requests.Engine."""

    def __init__(self, order: EngineOrder) -> None:
        case, self._launches = order.case, _LaunchCounter()
        self._case = case
        drafts = _NUM_DRAFTS if case.speculation is not Speculation.NONE else 0
        sizes = range(1, order.max_requests + 1) if case.graphs is Graphs.FULL_DECODE else ()
        self._decoder = Decoder(
            _model(order.model, order.device),
            num_slots=case.slots,
            rank=case.rank,
            max_requests=order.max_requests,
            max_length=order.max_length,
            max_prompt_tokens=order.max_requests * order.max_length,
            lm_head=True,
            graph_sizes=sizes,
            num_drafts=drafts,
        )
        self._decoder.capture()
        self._drafter = _drafter(order)
        self._adapters: dict[str, Adapter] = {}
        self._drafts = DraftCounts()

    def load(self, name: str, folder: Path) -> None:
        self._adapters[name] = read_peft_folder(folder, name=name)
        slots = self._decoder.slots
        if name in slots.names or len(slots.names) < slots.num_slots:
            slots.activate(self._adapters[name])

    def unload(self, name: str) -> None:
        del self._adapters[name]
        if name in self._decoder.slots.names:
            self._decoder.slots.evict(name)

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        found: dict[int, Completion] = {}
        for wave in _waves(requests, self._decoder.slots.num_slots):
            self._make_resident([requests[index].adapter for index in wave])
            answers = self._decoded([requests[index] for index in wave])
            found |= dict(zip(wave, answers, strict=True))
        return [found[index] for index in range(len(requests))]

    def counts(self) -> EngineCounts:
        drafted = self._drafter is not None
        return EngineCounts(
            drafts_accepted=self._drafts.accepted if drafted else None,
            drafts_rejected=self._drafts.rejected if drafted else None,
            graphs_replayed=self._decoder.runner.replays,
            kernels_launched=self._launches.launched,
            kernels_captured=self._launches.captured,
        )

    def trace(self, tokens: Sequence[int], adapter: str | None) -> Mapping[str, Tensor]:
        decoder = self._decoder
        self._make_resident([adapter])
        slot = -1 if adapter is None else decoder.slots.slot_of(adapter)
        # what stands in the place of modules of transformers; the head has a row for each prompt
        modules = {
            name: module
            for name, module in decoder.model.named_modules()
            if isinstance(module, (Columns, ServedExperts)) and name != "lm_head"
        }
        return traced(modules, len(tokens), lambda: decoder.prefill([tokens], [slot], first_line=0))

    def close(self) -> None:
        pass

    def _make_resident(self, names: Sequence[str | None]) -> None:
        slots, wanted = self._decoder.slots, dict.fromkeys(name for name in names if name)
        unused = [name for name in slots.names if name not in wanted]
        for name in wanted:
            if name not in slots.names:
                if len(slots.names) == slots.num_slots:
                    slots.evict(unused.pop(0))
                slots.activate(self._adapters[name])

    def _decoded(self, requests: Sequence[Request]) -> list[Completion]:
        most = max(request.new_tokens for request in requests)
        # all requests of a batch name the same tokens
        config = GenerationConfig(max_new_tokens=most, eos_token_id=[*requests[0].stop])
        wants_logprobs = self._case.logprobs is Logprobs.ON
        generation = Generation(
            self._decoder, config, drafter=self._drafter, logprobs=wants_logprobs
        )
        numbers = [generation.add(Served(r.prompt, r.adapter)) for r in requests]
        while generation.step():
            pass
        self._drafts = self._drafts.plus(
            generation.drafts.accepted,
            verified=generation.drafts.accepted + generation.drafts.rejected,
        )
        return [
            _completion(generation, number, request)
            for number, request in zip(numbers, requests, strict=True)
        ]


def _completion(generation: Generation, number: int, request: Request) -> Completion:
    """All requests were given as many tokens as the longest one."""
    count, logprobs = request.new_tokens, generation.logprobs.get(number)
    tokens = tuple(generation.answers[number][:count])
    return Completion(tokens, None if logprobs is None else tuple(logprobs[:count]))


def _waves(requests: Sequence[Request], slots: int) -> Iterator[list[int]]:
    """Indices of requests, in their order, that use no more adapters than there are slots."""
    wave: list[int] = []
    used: set[str] = set()
    for index, request in enumerate(requests):
        own = {request.adapter} if request.adapter else set()
        if len(used | own) > slots:
            yield wave
            wave, used = [], set()
        wave.append(index)
        used |= own
    if wave:
        yield wave


def _model(folder: Path, device: str) -> Any:
    options = {"local_files_only": True, "trust_remote_code": False, "use_safetensors": True}
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", **options)
    return model.to(device)


def _drafter(order: EngineOrder) -> Drafter | None:
    if order.case.speculation is Speculation.NGRAM:
        return NgramDrafts()
    if order.drafts is None:
        return None
    # without adapters: right for the base model, and wrong for everybody else
    decoder = Decoder(
        _model(order.drafts, order.device),
        num_slots=1,
        rank=1,
        max_requests=order.max_requests,
        max_length=order.max_length + _NUM_DRAFTS,
        max_prompt_tokens=order.max_requests * order.max_length,
    )
    return ModelDrafts(decoder)


class _LaunchCounter(LaunchCounts):
    """Counts the launches of kernels of adapters in this process."""

    def __init__(self) -> None:
        super().__init__()
        if interpreter.is_on():
            from triton.runtime.interpreter import GridExecutor

            GridExecutor.__call__ = self._counted(GridExecutor.__call__)
        else:
            from triton import knobs

            knobs.runtime.launch_enter_hook.add(lambda metadata: self.note())

    def _counted(self, launch: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **options: Any) -> Any:
            self.launched += 1
            return launch(*args, **options)

        return counted
