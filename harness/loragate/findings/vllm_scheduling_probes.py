"""Probes of which adapters vLLM schedules together, numbers, loads and drops from step to step.
They call its own functions, with as little around them as these read; nothing runs on a device.
"""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import torch

from loragate.findings.ledger import Observation
from loragate.findings.probing import Probe, layer_probe, seen
from loragate.findings.vllm_adapter_probes import adapter_request, slot_manager
from loragate.subjects.vllm.layer_package import VllmLayers

_RANK = 8
# tokens of a block and of a step, blocks, and the longest request
_BLOCK, _BUDGET, _BLOCKS, _LENGTH = 16, 32, 64, 128


def skipped_request_frees_its_adapter(layers: VllmLayers, device: str) -> Observation:
    slots = 1
    scheduler = _scheduler(layers, slots=slots)
    scheduler.add_request(_queued(layers, 1, _BLOCK))
    first = scheduler.schedule()
    # two stages of a pipeline: the next step begins before the token of the first one is back
    scheduler.add_request(_queued(layers, 2, 2 * _BUDGET))
    scheduler.schedule()
    scheduler.update_from_output(first, _sampled(layers, first))
    running = sorted(request.lora_request.lora_int_id for request in scheduler.running)
    try:
        third = scheduler.schedule()
    except AssertionError:
        text = (
            f"max_loras is {slots}, requests of adapters {running} run, and the next step asserts"
        )
        return seen(len(running) > slots, text)
    count = len(third.num_scheduled_tokens)
    text = f"max_loras is {slots}, requests of adapters {running} run; a step has {count} of them"
    return seen(count > slots, text)


def wide_id_ends_the_step(layers: VllmLayers, device: str) -> Observation:
    number = 1 << 31
    state: Any = layers.module("v1.worker.gpu.lora_utils").LoraState(1)
    request = adapter_request(layers, number)
    try:
        state.add_request("request", 0, request)
    except OverflowError as error:
        text = f"LoRARequest takes id {number}, and the runner's state refuses it: {error}"
        return seen(True, text)
    found = int(state.lora_ids[0])
    return seen(found != number, f"id {number} is kept as {found}")


def dummy_batch_drops_adapters(layers: VllmLayers, device: str) -> Observation:
    manager, adapter = slot_manager(layers, slots=2), layers.module("lora.lora_model").LoRAModel
    for number in (1, 2):
        manager.add_adapter(adapter(number, _RANK, {}))
    manager.pin_adapter(1)
    runner = _idle_runner(layers, manager)
    worker = layers.module("v1.worker.gpu_worker").Worker
    before = sorted(runner.list_loras())
    worker.execute_dummy_batch(SimpleNamespace(model_runner=runner))
    after = sorted(runner.list_loras())
    text = f"a rank has adapters {before}, 1 is pinned; after a dummy batch it has {after}"
    return seen(not set(before) <= set(after), text)


def adapter_loaded_in_place_loads_each_step(layers: VllmLayers, device: str) -> Observation:
    loads: list[int] = []
    worker = _worker_manager(layers, slot_manager(layers, slots=2), loads)
    stored = asyncio.run(_load_in_place(layers, worker))
    at_first = len(loads)
    for _ in range(2):
        worker.set_active_adapters({stored}, None)
    text = (
        f"load_lora_adapter with load_inplace reads the adapter {at_first} time, and two steps of "
        f"a later request read it {len(loads) - at_first} times"
    )
    return seen(len(loads) > at_first == 1, text)


SCHEDULING_PROBES: dict[str, Probe] = {
    "skipped-request-frees-its-adapter": layer_probe(skipped_request_frees_its_adapter),
    "wide-adapter-id-ends-the-step": layer_probe(wide_id_ends_the_step),
    "dummy-batch-drops-adapters": layer_probe(dummy_batch_drops_adapters),
    "adapter-loaded-in-place-loads-each-step": layer_probe(adapter_loaded_in_place_loads_each_step),
}


def _worker_manager(layers: VllmLayers, manager: Any, loads: list[int]) -> Any:
    """What loads the adapters of a step into `manager`; `loads` gets the id of each that it would
    read from disk."""
    managers = layers.module("lora.worker_manager")
    worker = managers.LRUCacheWorkerLoRAManager.__new__(managers.LRUCacheWorkerLoRAManager)
    worker._adapter_manager, worker.embedding_modules = manager, {}

    def load(request: Any) -> Any:
        loads.append(request.lora_int_id)
        return layers.module("lora.lora_model").LoRAModel(request.lora_int_id, _RANK, {})

    worker._load_adapter = load
    return worker


async def _load_in_place(layers: VllmLayers, worker: Any) -> Any:
    """What a server keeps of an adapter that it was told to load in place."""
    models = layers.module("entrypoints.openai.models.serving").OpenAIServingModels
    protocol = layers.module("entrypoints.serve.lora.protocol")

    async def add_lora(request: Any) -> bool:
        return bool(worker.add_adapter(request))

    parts = dict.fromkeys(("model_config", "renderer", "input_processor"))
    server = models(SimpleNamespace(**parts, add_lora=add_lora), [])
    body = protocol.LoadLoRAAdapterRequest(lora_name="x", lora_path="/nowhere", load_inplace=True)
    await server.load_lora_adapter(body)
    return server.lora_requests["x"]


def _idle_runner(layers: VllmLayers, manager: Any) -> Any:
    """The second model runner of a stage that does not sample; its model is never called."""
    runners = layers.module("v1.worker.gpu.model_runner")
    runner = runners.GPUModelRunner.__new__(runners.GPUModelRunner)
    nothing = SimpleNamespace(set_disabled=lambda off: None, step=lambda **options: None)
    runner.kv_connector = runner.eplb = nothing
    runner.max_num_reqs, runner.decode_query_len = 1, 1
    runner.is_first_pp_rank, runner.is_last_pp_rank = True, False
    runner.lora_config = SimpleNamespace(
        max_loras=2, max_lora_rank=_RANK, fully_sharded_loras=False
    )
    runner.lora_manager = _worker_manager(layers, manager, [])
    manager.lora_config = runner.lora_config
    manager.model = torch.nn.Module()
    manager._set_adapter_mapping = lambda mapping: None
    runner.execute_model = lambda *arguments, **options: None
    return runner


def _scheduler(layers: VllmLayers, *, slots: int) -> Any:
    """What schedules requests for a pipeline of two stages, with a model of one layer."""
    kv: Any = layers.module("v1.kv_cache_interface")
    schedulers: Any = layers.module("v1.core.sched.scheduler")
    spec = kv.FullAttentionSpec(block_size=_BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32)
    caches = kv.KVCacheConfig(_BLOCKS, [], [kv.KVCacheGroupSpec(["layer"], spec)])
    no_images = SimpleNamespace(supports_multimodal_inputs=lambda model: False)
    no_grammars = SimpleNamespace(should_advance=lambda request: False)
    return schedulers.Scheduler(
        _server(layers, slots), caches, no_grammars, _BLOCK, mm_registry=no_images
    )


def _server(layers: VllmLayers, slots: int) -> Any:
    """The part of a server's configuration that a scheduler reads."""
    off = ("kv_events_config", "kv_transfer_config", "ec_transfer_config", "speculative_config")
    return SimpleNamespace(
        **dict.fromkeys(off),
        **_model_on_two_stages(),
        scheduler_config=layers.module("config").SchedulerConfig(
            max_model_len=_LENGTH,
            is_encoder_decoder=False,
            max_num_batched_tokens=_BUDGET,
            max_num_seqs=4,
            async_scheduling=False,
        ),
        lora_config=SimpleNamespace(max_loras=slots),
        cache_config=SimpleNamespace(
            num_gpu_blocks=_BLOCKS, block_size=_BLOCK, enable_prefix_caching=False
        ),
        observability_config=SimpleNamespace(
            kv_cache_metrics=False, enable_logging_iteration_details=False
        ),
        num_speculative_tokens=0,
        use_v2_model_runner=False,
    )


def _model_on_two_stages() -> dict[str, Any]:
    model = SimpleNamespace(
        max_model_len=_LENGTH,
        is_encoder_decoder=False,
        is_diffusion=False,
        enable_return_routed_experts=False,
    )
    parallel = SimpleNamespace(
        pipeline_parallel_size=2,
        data_parallel_index=0,
        decode_context_parallel_size=1,
        prefill_context_parallel_size=1,
    )
    return {
        "model_config": model,
        "parallel_config": parallel,
        "max_concurrent_batches": 2,
        "max_in_flight_tokens": 2 * _BUDGET,
    }


def _queued(layers: VllmLayers, number: int, length: int) -> Any:
    """A request of an adapter with a prompt of this length."""
    options = layers.module("sampling_params").SamplingParams(max_tokens=8, ignore_eos=True)
    return layers.module("v1.request").Request(
        f"request {number}",
        [0] * length,
        options,
        None,
        lora_request=adapter_request(layers, number),
    )


def _sampled(layers: VllmLayers, step: Any) -> Any:
    """What a model returns for a step: token 0 for each request."""
    names = [*step.num_scheduled_tokens]
    places = {name: place for place, name in enumerate(names)}
    return layers.module("v1.outputs").ModelRunnerOutput(names, places, [[0] for _ in names])
