"""An engine of vLLM in a process of its own, which times itself. `loragate.engine.serve` makes it
by one of three functions, and calls its methods for `bench engine`."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

from loragate.bench.engine_figures import KernelCounts
from loragate.bench.engine_folders import VOCABULARY
from loragate.bench.engine_rows import ADAPTERS, EngineRow, Load, Serving
from loragate.bench.engine_setup import arguments_of
from loragate.bench.engine_watch import LaunchWatch, ReplayClock
from loragate.engine.order import EngineOrder
from loragate.subjects.vllm.engine_arguments import environment
from lorakernels.integrations.vllm import launch_counts, register

_SEED = 1


def base(order: EngineOrder) -> TimedEngine:
    """Without adapters."""
    return TimedEngine(order, Serving.BASE)


def vllm(order: EngineOrder) -> TimedEngine:
    """With the kernels of vLLM."""
    return TimedEngine(order, Serving.VLLM)


def lorakernels(order: EngineOrder) -> TimedEngine:
    """With the plug-in."""
    return TimedEngine(order, Serving.LORAKERNELS)


class TimedEngine:
    """The calls come in the order of the methods."""

    def __init__(self, order: EngineOrder, serving: Serving) -> None:
        plugin = serving is Serving.LORAKERNELS
        os.environ.update(environment(order, plugin=plugin, process=os.getpid()))
        # read when it is imported
        from vllm import LLM

        if plugin:
            # vLLM finds the plug-in of an installed distribution by itself; a source tree has none
            register()
        with LaunchWatch() as self._starting:
            self._llm: Any = LLM(**arguments_of(order, serving))
        self._serving_requests = LaunchWatch()
        self._before = launch_counts()
        self._adapters: list[Any] = []
        self._serving = serving

    def prepare(self, adapter: Path, rows: Sequence[EngineRow]) -> None:
        """Load the adapter into all slots, and compile what the rows need by serving each once."""
        if self._serving is not Serving.BASE:
            self._load(adapter)
        with self._serving_requests:
            for row in rows:
                for load in row.loads:
                    self._seconds(load)

    def kernel_counts(self) -> KernelCounts:
        """Whose kernels of adapters were captured in the start, and launched in `prepare`: with the
        dummy runs of a start not even an engine that serves no adapter would have no launches."""
        ours, before = launch_counts(), self._before
        return KernelCounts(
            launched={name: ours[name].launched - before[name].launched for name in ours},
            captured={name: count.captured for name, count in before.items()},
            vllms_launched=self._serving_requests.launched,
            vllms_captured=self._starting.captured,
            vllms_of_layers=(
                self._serving_requests.of_layers.launched + self._starting.of_layers.captured
            ),
        )

    def replay_us(self, row: EngineRow) -> float:
        """The median time on the device of the graph of a decode step. RuntimeError if the steps
        were not replayed from a graph."""
        with ReplayClock() as clock:
            self._seconds(row.loads[-1])
        found = clock.microseconds()
        if len(found) < row.units:
            raise RuntimeError(f"{row.id}: {row.units} steps, but {len(found)} replays of graphs")
        return median(found)

    def measure(self, row: EngineRow) -> float:
        """Microseconds of one unit of the row."""
        return row.microseconds(self._seconds)

    def close(self) -> None:
        """Nothing: the engine ends with its process, and cannot fail in its end."""

    def _load(self, adapter: Path) -> None:
        from vllm.lora.request import LoRARequest

        for number in range(1, ADAPTERS + 1):
            # slots of equal content cost what others do
            request = LoRARequest(f"adapter-{number}", number, str(adapter))
            self._llm.llm_engine.add_lora(request)
            self._adapters.append(request)

    def _seconds(self, load: Load) -> float:
        from vllm import SamplingParams

        random = Random(_SEED)
        prompts = [
            {"prompt_token_ids": random.choices(range(VOCABULARY), k=load.prompt)}
            for _ in range(load.requests)
        ]
        # tokens of drawn weights are nearly equally likely: drawn from them, they are routed to
        # many experts, while the most likely ones soon repeat in all requests alike
        sampling = SamplingParams(
            temperature=1.0, max_tokens=load.new_tokens, ignore_eos=True, detokenize=False
        )
        adapters = [self._adapter_of(load, number) for number in range(load.requests)]
        start = time.perf_counter()
        self._llm.generate(prompts, sampling, lora_request=adapters, use_tqdm=False)
        return time.perf_counter() - start

    def _adapter_of(self, load: Load, request: int) -> Any:
        number = load.adapter_of(request)
        return None if number is None or not self._adapters else self._adapters[number]
