"""Probes of how vLLM maps adapters to the rows of a vision tower. They call its own functions, with
as little around them as these read; the tower is one linear layer.
"""

from __future__ import annotations

import sys
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

from loragate.findings.ledger import Observation
from loragate.findings.probing import Probe, layer_probe, seen
from loragate.findings.vllm_tower_steps import (
    ADAPTERS,
    WIDTH,
    calls_of_ranks,
    make_item,
    make_tower,
    map_rows,
    step_of_first_runner,
    step_of_second_runner,
)
from loragate.subjects.vllm.layer_package import VllmLayers


def blip2_counts_rows_in_floats(layers: VllmLayers, device: str) -> Observation:
    blip: Any = layers.module("model_executor.models.blip2").Blip2ForConditionalGeneration
    queries, image, patch_size, budget = 32, 224, 14, 2048
    rows = (image // patch_size) ** 2 + 1
    of_model = SimpleNamespace(
        config=SimpleNamespace(num_query_tokens=queries), _vision_tokens_per_image=rows
    )
    names = ("get_mm_mapping", "get_num_mm_encoder_tokens", "get_num_mm_connector_tokens")
    model = SimpleNamespace(**{name: partial(getattr(blip, name), of_model) for name in names})
    counts = (model.get_num_mm_encoder_tokens(budget), model.get_num_mm_connector_tokens(rows))
    error = _started(layers, model, budget)
    text = (
        f"{budget} tokens of images are counted as {counts[0]!r} rows of the tower, those of one "
        f"image as {counts[1]!r} rows of the connector, and the manager of adapters "
        f"{error or 'takes them'}"
    )
    return seen(float in map(type, counts) and bool(error), text)


def second_modality_gets_adapters_of_first(layers: VllmLayers, device: str) -> Observation:
    rows = 4
    items = [
        make_item(layers, modality, rows, adapter)
        for modality, adapter in zip(("image", "video"), ADAPTERS, strict=True)
    ]
    calls = {}
    for name, run in (("first", step_of_first_runner), ("second", step_of_second_runner)):
        tower = make_tower(layers, device)
        run(layers, tower, items, device)
        # one call with the image, one with the video
        _, calls[name] = tower.calls
    found = "; ".join(
        f"in the {name} runner {rows} rows of a video of adapter {call.content[0]} get adapters "
        f"{call.adapters}, and {call.behind} rows behind them are written"
        for name, call in calls.items()
    )
    text = f"a step with an image of adapter {ADAPTERS[0]} before: {found}"
    return seen(any(call.is_wrong for call in calls.values()), text)


def sharded_towers_get_adapters_of_other_images(layers: VllmLayers, device: str) -> Observation:
    vision: Any = layers.module("model_executor.models.vision")
    rows = 4
    images = torch.stack([torch.full((rows, WIDTH), n, device=device) for n in ADAPTERS])
    grids = [[1, 1, rows]] * len(images)
    mrope = partial(vision.run_dp_sharded_mrope_vision_model, rope_type="rope_3d")
    runs = {
        "with mrope": lambda tower: mrope(tower, images.flatten(0, 1), grids),
        "without": lambda tower: vision.run_dp_sharded_vision_model(images, tower),
    }
    calls = {name: calls_of_ranks(layers, run, rows, device) for name, run in runs.items()}
    wrong = {name: [call for call in of if call.is_wrong] for name, of in calls.items()}
    text = "; ".join(
        f"{name} {rows} rows of the image of adapter {call.content[0]} get adapters "
        f"{call.adapters}, and {call.behind} rows behind them are written"
        for name, of in wrong.items()
        for call in of
    )
    text = f"two images of adapters 1 and 2 on two ranks: {text or 'all rows are right'}"
    return seen(any(wrong.values()), text)


def class_token_shifts_adapters(layers: VllmLayers, device: str) -> Observation:
    clip: Any = layers.module("model_executor.models.clip")
    vision: Any = layers.module("model_executor.models.vision")
    llava = _llava(layers)
    config = SimpleNamespace(hidden_size=WIDTH, image_size=28, patch_size=14, num_channels=3)
    default = layers.config.VllmConfig(device_config=layers.config.DeviceConfig(device=device))
    with layers.config.set_current_vllm_config(default), torch.inference_mode():
        embeddings = clip.CLIPVisionEmbeddings(config).to(device)
        rows = embeddings(torch.ones(1, 3, 28, 28, device=device)).shape[1]
    # what LLaVA takes of them for its prompt, unless a config says otherwise
    tokens = vision.get_num_selected_vision_tokens(rows, "default")
    tower = make_tower(layers, device)
    tower.get_num_mm_encoder_tokens = partial(llava.get_num_mm_encoder_tokens, None)
    map_rows(layers, tower, [make_item(layers, "image", tokens, adapter) for adapter in ADAPTERS])
    tower(torch.stack([torch.full((rows, WIDTH), n, device=device) for n in ADAPTERS]))
    (call,) = tower.calls
    text = (
        f"two images of {tokens} tokens have {rows} rows each in CLIP, which get adapters "
        f"{call.adapters}; {call.content} is right"
    )
    return seen(call.is_wrong, text)


TOWER_PROBES: dict[str, Probe] = {
    "blip2-counts-rows-in-floats": layer_probe(blip2_counts_rows_in_floats),
    "second-modality-gets-adapters-of-first": layer_probe(second_modality_gets_adapters_of_first),
    "sharded-towers-get-adapters-of-other-images": layer_probe(
        sharded_towers_get_adapters_of_other_images
    ),
    "class-token-shifts-adapters": layer_probe(class_token_shifts_adapters),
}


def _llava(layers: VllmLayers) -> Any:
    """LLaVA, which may have other towers: that of Pixtral needs names that recent releases of
    transformers lack, so that the module is imported without it and then forgotten."""
    of_pixtral = SimpleNamespace(PixtralHFEncoderInfo=object, PixtralHFVisionModel=object)
    # what is imported on the way must stay
    layers.module("model_executor.models.siglip")
    with patch.dict(sys.modules, {"vllm.model_executor.models.pixtral": of_pixtral}):
        return layers.module("model_executor.models.llava").LlavaForConditionalGeneration


def _started(layers: VllmLayers, model: Any, budget: int) -> str:
    """How the manager of adapters fails to set up the towers of a model; empty if it does not."""
    managers = layers.module("lora.model_manager")
    of_manager = SimpleNamespace(
        model=model,
        supports_mm=True,
        punica_wrapper_mapping={},
        max_num_seqs=2,
        device="cpu",
        lora_config=SimpleNamespace(
            max_loras=2, enable_tower_connector_lora=True, specialize_active_lora=False
        ),
    )
    of_budget = SimpleNamespace(
        mm_max_items_per_prompt={"image": 1}, get_encoder_budget=lambda: budget
    )
    vllm_config = SimpleNamespace(model_config=SimpleNamespace(multimodal_config=None))
    with (
        patch.object(managers, "MultiModalBudget", lambda *arguments: of_budget),
        patch.object(managers, "get_punica_wrapper", layers.wrapper),
    ):
        try:
            managers.LoRAModelManager._maybe_init_mm(of_manager, vllm_config, budget)
        except TypeError as error:
            return f"ends in a TypeError saying {str(error).splitlines()[0]!r}"
    return ""
