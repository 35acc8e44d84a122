"""vLLM as an engine, with its own kernels or with the plug-in of lorakernels."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

from loragate.engine.launch_counts import LaunchCounts
from loragate.engine.order import EngineOrder
from loragate.engine.requests import Completion, EngineCounts, Request
from loragate.matrix.engine_case import Logprobs, Speculation
from loragate.subjects.vllm.engine_arguments import ENVIRONMENT, engine_arguments, environment
from loragate.subjects.vllm.engine_counts import EngineEvents
from lorakernels.integrations.vllm import register

_ACCEPTED = "vllm:spec_decode_num_accepted_tokens"
_DRAFTED = "vllm:spec_decode_num_draft_tokens"
# an operator for two streams exists only where they are on when this is imported
_READS_STREAMS = "vllm.lora.layers.base_linear"


def preload() -> None:
    """Import what takes longest, and reads no option that differs between engines."""
    os.environ.update(ENVIRONMENT)
    for name in ("vllm.entrypoints.llm", "torch._inductor.compile_fx"):
        import_module(name)


def stock(order: EngineOrder) -> VllmEngine:
    """vLLM with its own kernels."""
    return VllmEngine(order, plugin=False)


def with_plugin(order: EngineOrder) -> VllmEngine:
    """vLLM with the plug-in."""
    return VllmEngine(order, plugin=True)


class VllmEngine:
    """See loragate.engine.requests.Engine. The names of adapters are vLLM's own; an adapter that is
    loaded again keeps its number and replaces the one that vLLM has."""

    def __init__(self, order: EngineOrder, *, plugin: bool) -> None:
        assert _READS_STREAMS not in sys.modules, "vLLM was imported before its options were set"
        os.environ.update(environment(order, plugin=plugin, process=os.getpid()))
        from vllm import LLM

        if plugin:
            # vLLM finds the plug-in of an installed distribution by itself; a source tree has none
            register()

        self._case, self._events = order.case, EngineEvents()
        # before its graphs are captured
        self._events.listen()
        # vLLM finds a graph that it has compiled by the path of the model among other things. Each
        # trial has a folder of its own, and would compile what a trial before it did
        os.chdir(order.model.parent)
        self._llm: Any = LLM(**engine_arguments(_named_from(order.model.parent, order)))
        self._numbers: dict[str, int] = {}
        self._folders: dict[str, Path] = {}
        self._plugin = plugin

    def load(self, name: str, folder: Path) -> None:
        again = name in self._folders
        self._numbers.setdefault(name, len(self._numbers) + 1)
        self._folders[name] = folder
        self._llm.llm_engine.add_lora(self._asked(name, load_inplace=again))

    def unload(self, name: str) -> None:
        # its number is kept: one that was another adapter's may be known to caches
        self._llm.llm_engine.remove_lora(self._numbers[name])
        del self._folders[name]

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        from vllm import SamplingParams

        wants_logprobs = self._case.logprobs is Logprobs.ON
        parameters = [
            SamplingParams(
                temperature=0.0,
                max_tokens=request.new_tokens,
                ignore_eos=True,
                stop_token_ids=list(request.stop),
                logprobs=1 if wants_logprobs else None,
                detokenize=False,
            )
            for request in requests
        ]
        outputs = self._llm.generate(
            [{"prompt_token_ids": list(request.prompt)} for request in requests],
            parameters,
            lora_request=[self._asked(r.adapter) if r.adapter else None for r in requests],
            use_tqdm=False,
        )
        return [completion(output.outputs[0], with_logprobs=wants_logprobs) for output in outputs]

    def counts(self) -> EngineCounts:
        counters = {m.name: m.value for m in self._llm.get_metrics() if hasattr(m, "value")}
        accepted, rejected = None, None
        if self._case.speculation is not Speculation.NONE:
            accepted = int(counters[_ACCEPTED])
            rejected = int(counters[_DRAFTED]) - accepted
        vllms, others = self._events.kernels, LaunchCounts()
        launched, captured = vllms.launched, vllms.captured
        if self._plugin:
            # the plug-in serves all layers of these models that multiply with A
            others = vllms.of_layers
            of_workers = self._llm.collective_rpc(_launches)
            launched, captured = (sum(part) for part in zip(*of_workers, strict=True))
        return EngineCounts(
            drafts_accepted=accepted,
            drafts_rejected=rejected,
            graphs_replayed=self._events.replays,
            kernels_launched=launched,
            kernels_captured=captured,
            others_launched=others.launched,
            others_captured=others.captured,
        )

    def close(self) -> None:
        self._llm.llm_engine.engine_core.shutdown()

    def _asked(self, name: str, *, load_inplace: bool = False) -> Any:
        from vllm.lora.request import LoRARequest

        return LoRARequest(
            lora_name=name,
            lora_int_id=self._numbers[name],
            lora_path=str(self._folders[name]),
            load_inplace=load_inplace,
        )


def _named_from(folder: Path, order: EngineOrder) -> EngineOrder:
    """The same order with the paths that its model and what drafts have from `folder`."""
    drafts = Path(os.path.relpath(order.drafts, folder)) if order.drafts else None
    return replace(order, model=Path(os.path.relpath(order.model, folder)), drafts=drafts)


def completion(output: Any, *, with_logprobs: bool) -> Completion:
    """Of a CompletionOutput of vLLM."""
    tokens = tuple(output.token_ids)
    if not with_logprobs:
        return Completion(tokens)
    # of each place those of the token and of the most likely one
    given = zip(output.logprobs, tokens, strict=True)
    return Completion(tokens, tuple(float(place[token].logprob) for place, token in given))


def _launches(worker: object) -> tuple[int, int]:
    """Of the plug-in, in a worker of vLLM: operators that launched their kernels, and captured
    them."""
    counts = import_module("lorakernels.integrations.vllm.launches").launch_counts()
    launched, captured = (
        sum(getattr(count, name) for count in counts.values()) for name in ("launched", "captured")
    )
    return launched, captured
