"""A vision tower of one linear layer with two adapters, and steps of vLLM that map these to its
rows. The layer is computed by vLLM's operators; nothing else runs on a device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from loragate.subjects.vllm.layer_package import VllmLayers

# the adapters of two requests, each of which has one image or video
ADAPTERS = (1, 2)
_REQUESTS = {"request 1": [0], "request 2": [0]}
WIDTH, _RANK = 16, 16
# rows that the operators may reach in the tensors of a probe
_ROOM = 64


@dataclass(frozen=True, slots=True)
class Call:
    """The content of each row of a call of a tower, its adapter, and how many rows behind them were
    written."""

    content: list[int]
    adapters: list[int]
    behind: int

    @property
    def is_wrong(self) -> bool:
        return self.adapters != self.content


@dataclass(slots=True)
class Tower:
    """A linear layer with two adapters, whose deltas are their numbers. It is what a runner calls
    the model, and what it calls the manager of the adapters."""

    wrapper: Any
    a: Tensor
    b: Tensor
    get_num_mm_encoder_tokens: Any = field(default=lambda tokens: tokens)
    calls: list[Call] = field(default_factory=list)
    # as large as its input
    spatial_merge_size: int = 1
    out_hidden_size: int = WIDTH

    def supports_tower_connector_lora(self) -> bool:
        return True

    def set_active_adapters(self, requests: object, mapping: Any) -> None:
        self.wrapper.update_metadata(mapping, list(ADAPTERS), len(ADAPTERS) + 1, 0)

    def embed_multimodal(self, *, pixels: Tensor) -> list[Tensor]:
        return list(self(pixels))

    def __call__(self, x: Tensor, grids: object = None) -> Tensor:
        rows = x.shape[:-1].numel()
        # the operators may reach rows behind their tensors, which must be the probe's own
        ones = torch.ones(_ROOM, WIDTH, dtype=torch.float16, device=x.device)
        shrunk = torch.zeros(1, _ROOM, _RANK, device=x.device)
        out = torch.zeros_like(ones)
        self.wrapper.add_shrink(shrunk[:, :rows], ones[:rows], (self.a,), 1.0)
        self.wrapper.add_expand(out[:rows], shrunk[:, :rows], (self.b,), (WIDTH,))
        adapters = [int(number) for number in out[:, 0].tolist()]
        content = [int(row[0]) for row in x.flatten(0, -2)]
        self.calls.append(Call(content, adapters[:rows], sum(map(bool, adapters[rows:]))))
        return x


def make_tower(layers: VllmLayers, device: str) -> Tower:
    slots = len(ADAPTERS)
    lora_config = SimpleNamespace(max_loras=slots, specialize_active_lora=False)
    # a server takes as many rows as its budget has; `_ROOM` is more than any probe maps
    wrapper = layers.wrapper(_ROOM, max_batches=slots, device=device, lora_config=lora_config)
    a = torch.zeros(slots, 1, _RANK, WIDTH, dtype=torch.float16, device=device)
    b = torch.zeros(slots, 1, WIDTH, _RANK, dtype=torch.float16, device=device)
    a[..., 0, 0] = 1
    for slot, adapter in enumerate(ADAPTERS):
        b[slot, ..., 0] = adapter
    return Tower(wrapper, a, b)


def make_item(layers: VllmLayers, modality: str, rows: int, adapter: int) -> Any:
    """An image or a video of so many rows, as the processor of a model gives it. It is full of the
    number of the adapter of its request."""
    inputs: Any = layers.module("multimodal.inputs")
    element = inputs.MultiModalFieldElem(
        data=torch.full((rows, WIDTH), adapter), field=inputs.MultiModalBatchedField()
    )
    return SimpleNamespace(
        identifier=modality,
        modality=modality,
        data=inputs.MultiModalKwargsItem({"pixels": element}),
        mm_position=inputs.PlaceholderRange(offset=0, length=rows),
    )


def step_of_first_runner(
    layers: VllmLayers, tower: Tower, items: Sequence[Any], device: str
) -> None:
    """One step of the first model runner, in which each request has one item."""
    runners: Any = layers.module("v1.worker.gpu_model_runner")
    runner, of_runner = runners.GPUModelRunner, _of_first_runner(tower, items, device)
    of_runner._batch_mm_inputs_from_scheduler = partial(
        runner._batch_mm_inputs_from_scheduler, of_runner
    )
    # pages are pinned for a GPU, which there may not be
    with patch.object(runners, "PIN_MEMORY", False):
        runner._execute_mm_encoder(of_runner, SimpleNamespace(scheduled_encoder_inputs=_REQUESTS))


def step_of_second_runner(
    layers: VllmLayers, tower: Tower, items: Sequence[Any], device: str
) -> None:
    """The same in the second model runner."""
    runners: Any = layers.module("v1.worker.gpu.mm.encoder_runner")
    cache = map_rows(layers, tower, items)
    encoder = runners.EncoderRunner(tower, 1, 1, cache, torch.float16, torch.device(device))
    _, batch = encoder.prepare_mm_inputs(_REQUESTS)
    group = runners.group_and_batch_mm_kwargs

    def without_pinning(items: Any, **options: Any) -> Any:
        return group(items, **{**options, "pin_memory": False})

    with patch.object(runners, "group_and_batch_mm_kwargs", without_pinning):
        encoder.execute_mm_encoder(batch)


def map_rows(layers: VllmLayers, tower: Tower, items: Sequence[Any]) -> Any:
    """Map adapters to the rows of a step, as the second model runner does; the cache of its
    items."""
    cache = SimpleNamespace(
        mm_features={name: [item] for name, item in zip(_REQUESTS, items, strict=True)}
    )
    layers.module("v1.worker.gpu.mm.lora").set_active_mm_loras(
        model=tower,
        lora_manager=tower,
        encoder_cache=cache,
        req_id_to_index={name: row for row, name in enumerate(_REQUESTS)},
        lora_state=SimpleNamespace(lora_ids=ADAPTERS, lora_requests={}),
        scheduled_encoder_inputs=_REQUESTS,
    )
    return cache


def calls_of_ranks(
    layers: VllmLayers, run: Callable[[Tower], object], rows: int, device: str
) -> list[Call]:
    """The call of a tower on each of two ranks, which share two images."""
    vision: Any = layers.module("model_executor.models.vision")
    size, calls = len(ADAPTERS), []
    for rank in range(size):
        tower = make_tower(layers, device)
        map_rows(layers, tower, [make_item(layers, "image", rows, n) for n in ADAPTERS])
        with (
            patch.object(vision, "get_tensor_model_parallel_world_size", return_value=size),
            patch.object(vision, "get_tensor_model_parallel_rank", return_value=rank),
            patch.object(
                vision, "tensor_model_parallel_all_gather", lambda x, dim: torch.cat([x] * size)
            ),
        ):
            run(tower)
        calls += tower.calls
    return calls


def _of_first_runner(tower: Tower, items: Sequence[Any], device: str) -> Any:
    """What the first model runner has when it encodes the items of a step."""
    return SimpleNamespace(
        requests={
            name: SimpleNamespace(mm_features=[item])
            for name, item in zip(_REQUESTS, items, strict=True)
        },
        input_batch=SimpleNamespace(
            req_id_to_index={name: row for row, name in enumerate(_REQUESTS)},
            request_lora_mapping=ADAPTERS,
            lora_id_to_lora_request={},
        ),
        model=tower,
        lora_config=True,
        lora_manager=tower,
        device=torch.device(device),
        observability_config=None,
        is_multimodal_pruning_enabled=False,
        requires_sequential_video_encoding=False,
        encoder_cudagraph_manager=None,
        encoder_cache={},
        timed_encoder_operation=lambda *arguments: nullcontext(),
        maybe_save_ec_to_connector=lambda *arguments: None,
    )
