"""A vllm whose engine does what LORAGATE_STUB says: `us` of a step, by the kernels that serve it.

It launches, captures and replays what the real one would, as far as `bench engine` looks at it.
There is no device: graphs and events are fakes that share one clock.
"""

from __future__ import annotations

import json
import os
import time

import torch
from triton import knobs

from lorakernels.integrations.vllm.launches import Operator, count

_NOW = [0.0]
time.perf_counter = lambda: _NOW[0]


class Graph:
    def replay(self):
        _NOW[0] += STEP_US / 1e6


class Event:
    def __init__(self, enable_timing):
        assert enable_timing

    def record(self):
        self.at = _NOW[0]

    def elapsed_time(self, end):
        return (end.at - self.at) * 1e3


torch.cuda.CUDAGraph, torch.cuda.Event = Graph, Event
torch.cuda.synchronize = lambda: None
_CAPTURES = [False]
torch.cuda.is_current_stream_capturing = lambda: _CAPTURES[0]


class Launch:
    def __init__(self, name):
        self.name = name

    def get(self):
        return {"name": self.name}


class SamplingParams:
    def __init__(self, *, temperature, max_tokens, ignore_eos, detokenize):
        assert (temperature, ignore_eos, detokenize) == (1.0, True, False)
        self.max_tokens = max_tokens


class LLM:
    def __init__(self, **arguments):
        global STEP_US
        self.has_adapters = arguments.get("enable_lora", False)
        self.step_tokens = arguments["max_num_batched_tokens"]
        self.plugin = os.environ["LORAKERNELS_VLLM"] == "1"
        given = json.loads(os.environ["LORAGATE_STUB"])
        name = "lorakernels" if self.plugin else "vllm" if self.has_adapters else "base"
        if name == given.get("broken"):
            raise RuntimeError("no memory for a cache")
        STEP_US, self.graphs = given["us"][name], given.get("graphs", True)
        # an engine that the plug-in was not registered in
        self.plugin = self.plugin and given.get("registers", True)
        self.llm_engine, self.loaded = self, []
        # a dummy run, and a capture
        self._run([True], captures=False)
        self._run([True], captures=True)

    def add_lora(self, request):
        assert self.has_adapters
        self.loaded.append(request)

    def generate(self, prompts, sampling, *, lora_request, use_tqdm):
        assert len(prompts) == len(lora_request)
        assert all(request is None or request in self.loaded for request in lora_request)
        # a request is handled before the first step, which takes as many prompts as fill it
        tokens = len(prompts) * len(prompts[0]["prompt_token_ids"])
        steps = -(-tokens // self.step_tokens)
        _NOW[0] += 1.0 + steps * STEP_US / 1e6
        self._run(lora_request, captures=False)
        for _ in range(sampling.max_tokens - 1):
            if self.graphs:
                Graph().replay()

    def _run(self, adapters, *, captures):
        if not self.has_adapters or not any(adapters):
            return
        _CAPTURES[0] = captures
        if self.plugin:
            for operator in (Operator.LINEAR, Operator.EXPERTS):
                count(operator, runs=True, captures=captures)
        else:
            knobs.runtime.launch_enter_hook(Launch("_lora_shrink_kernel"))
        # of the embedding, which the plug-in leaves to vLLM
        knobs.runtime.launch_enter_hook(Launch("_lora_expand_kernel"))
        _CAPTURES[0] = False
