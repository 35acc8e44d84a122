"""A decoder's batches are compared with transformers and PEFT, which get each request alone."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lorakernels.adapters.adapter import Adapter
from lorakernels.adapters.peft_folder import read_peft_folder
from lorakernels.dense.weights import LoRAFactors
from lorakernels.layers.moe import FusedMoELoRA
from lorakernels.moe.weights import ExpertFactors, Factors

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers", minversion="5.23")

from lorakernels.serving.decoder import Decoder  # noqa: E402
from lorakernels.serving.generation import Request, generate  # noqa: E402
from lorakernels.serving.projections import ServedExperts  # noqa: E402
from lorakernels.serving.tiny import KINDS, tiny_model  # noqa: E402

# each launch takes a tenth of a second in the interpreter, so there are few models and steps
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("qwen3", {"attention_bias": True, "tie_word_embeddings": True}),
    "qwen3-ungrouped": ("qwen3", {"num_key_value_heads": 4}),
    "qwen3_moe": ("qwen3_moe", {"mlp_only_layers": [1]}),
    "qwen3_next": ("qwen3_next", {"attention_bias": True, "tie_word_embeddings": True}),
}
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
TOKENS = ["embed_tokens"]
VOCABULARY = [*TOKENS, "lm_head"]
MLP = ["gate_proj", "up_proj", "down_proj"]
DELTA_NET = ["in_proj_qkvz", "in_proj_ba", "out_proj", "shared_expert_gate"]
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
PROMPTS = [[3, 5, 9], [7], [11, 12, 13, 14, 15], [2, 4]]
ADAPTERS = ["wide", None, "narrow", "wide"]
# each logit comes out of some 16 products, one after the other, of up to 64 terms that are added
# up in another order: 16 * 64 roundings of fp32, relative to the largest logit
TOLERANCE = 16 * 64 * torch.finfo(torch.float32).eps


def adapters(kind: str) -> dict[str, dict[str, Any]]:
    """The options of two adapters of different ranks; no alpha is a rank."""
    narrow = {"r": 2, "lora_alpha": 3, "target_modules": ["k_proj", "o_proj", *VOCABULARY]}
    wide: dict[str, Any] = {"r": 4, "lora_alpha": 10, "target_modules": ATTENTION + MLP + TOKENS}
    if kind != "qwen3":
        # PEFT takes linears of these names for projections of experts in a model that has experts
        wide |= {"target_modules": ATTENTION + TOKENS, "target_parameters": EXPERTS}
    if kind == "qwen3_next":
        wide["target_modules"] = ATTENTION + DELTA_NET
    return {"wide": wide, "narrow": narrow}


def save_adapter(base: nn.Module, folder: Path, options: dict[str, Any], seed: int) -> None:
    """A folder of PEFT with random factors, B included."""
    model = peft.get_peft_model(copy.deepcopy(base), peft.LoraConfig(**options))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if ".lora_" in name:
                noise = torch.randn(weight.shape, generator=generator)
                weight.copy_(noise * 0.5 * weight.shape[-1] ** -0.5)
    model.save_pretrained(folder)


@dataclass
class Compared:
    """A model as transformers and PEFT run it, with each adapter, and folders of the adapters."""

    base: nn.Module
    folders: dict[str, Path]

    def logits(self, adapter: str | None, tokens: list[int]) -> Tensor:
        """[tokens, vocabulary], of one request alone."""
        model = copy.deepcopy(self.base)
        if adapter is not None:
            model = peft.PeftModel.from_pretrained(model, self.folders[adapter]).eval()
        with torch.no_grad():
            return model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]

    def decoder(self, **sizes: int) -> Decoder:
        sizes = {"max_requests": 4, "max_length": 12, "max_prompt_tokens": 20} | sizes
        decoder = Decoder(
            copy.deepcopy(self.base),
            num_slots=3,
            rank=4,
            lm_head=True,
            embed_tokens=True,
            **sizes,
        )
        for folder in self.folders.values():
            decoder.slots.activate(read_peft_folder(folder))
        return decoder


@pytest.fixture
def compared(request: pytest.FixtureRequest, tmp_path: Path) -> Compared:
    kind, changes = MODELS[request.param]
    base = tiny_model(kind, **changes)
    folders = {name: tmp_path / name for name in adapters(kind)}
    for seed, (name, options) in enumerate(adapters(kind).items()):
        save_adapter(base, folders[name], options, seed)
    return Compared(base, folders)


def assert_close(found: Tensor, expected: Tensor) -> None:
    atol = TOLERANCE * float(expected.abs().max())
    torch.testing.assert_close(found, expected, rtol=0, atol=atol)


def assert_preferred(answer: tuple[int, ...], expected: Tensor) -> None:
    """Each token of the answer is the one with the highest logit, where that is beyond doubt."""
    best = expected.topk(2)
    margin = best.values[:, 0] - best.values[:, 1]
    is_clear = margin > 2 * TOLERANCE * float(expected.abs().max())
    assert is_clear.any()
    assert torch.equal(torch.tensor(answer)[is_clear], best.indices[is_clear, 0])


@pytest.mark.parametrize("compared", MODELS, indirect=True)
def test_each_request_of_a_mixed_batch_has_the_logits_of_peft_alone(compared: Compared) -> None:
    decoder = compared.decoder()
    slots = [-1 if name is None else decoder.slots.slot_of(name) for name in ADAPTERS]
    answers = [[8, 1], [6, 2], [5, 3], [4, 20]]
    steps = [decoder.prefill(PROMPTS, slots, first_line=0)]
    for index in range(2):
        tokens = [answer[index] for answer in answers]
        positions = [len(prompt) + index for prompt in PROMPTS]
        steps.append(decoder.decode(tokens, positions, slots).clone())
    for row, (prompt, answer) in enumerate(zip(PROMPTS, answers, strict=True)):
        expected = compared.logits(ADAPTERS[row], prompt + answer)[len(prompt) - 1 :]
        assert_close(torch.stack([logits[row] for logits in steps]), expected)
        if ADAPTERS[row] is not None:
            base = compared.logits(None, prompt + answer)[len(prompt) - 1 :]
            # otherwise the comparison would say nothing about the adapter
            assert (expected - base).abs().max() > 0.01 * base.abs().max()


def test_a_config_that_asks_for_tuples_and_for_all_states_gives_the_same_answers() -> None:
    requests = [Request(tuple(prompt)) for prompt in PROMPTS]
    config = transformers.GenerationConfig(max_new_tokens=2)
    sizes = {"num_slots": 1, "rank": 2, "max_requests": 4, "max_length": 8, "max_prompt_tokens": 20}
    for kind in KINDS:
        answers = [
            generate(Decoder(tiny_model(kind, **asked), **sizes), requests, config)
            for asked in ({}, {"return_dict": False, "output_hidden_states": True})
        ]
        assert answers[0] == answers[1]


@pytest.mark.parametrize("compared", ["qwen3_next"], indirect=True)
def test_requests_that_join_and_leave_get_the_tokens_that_peft_prefers(compared: Compared) -> None:
    decoder = compared.decoder(max_requests=2)
    requests = [Request(tuple(p), a) for p, a in zip(PROMPTS, ADAPTERS, strict=True)][1:]
    # the first request ends, and so the one of another adapter moves into its line
    first = int(compared.logits(None, PROMPTS[1])[-1].argmax())
    config = transformers.GenerationConfig(max_new_tokens=3, eos_token_id=first)
    answers = generate(decoder, requests, config)
    assert answers[0] == [first]
    for request, answer in zip(requests, answers, strict=True):
        tokens = [*request.prompt, *answer]
        expected = compared.logits(request.adapter, tokens)[len(request.prompt) - 1 : -1]
        assert_preferred(tuple(answer), expected)


def everywhere(layers: Mapping[str, Any], rank: int) -> Adapter:
    """An adapter for each linear and for the experts of each layer."""
    generator = torch.Generator().manual_seed(3)

    def noise(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator) * 0.5 * shape[-1] ** -0.5

    modules: dict[str, Factors] = {}
    for name, layer in layers.items():
        parent = name.rpartition(".")[0]
        if isinstance(layer, FusedMoELoRA):
            experts, hidden, inner = 4, layer.packing.hidden, layer.packing.intermediate
            for part, (n, k) in {
                "gate_up_proj": (2 * inner, hidden),
                "down_proj": (hidden, inner),
            }.items():
                a, b = noise(experts, rank, k), noise(experts, n, rank)
                modules[f"{name}.{part}"] = ExpertFactors(a, b, 0.7)
            continue
        for part, (index,) in layer.parts.items():
            width = layer.slots.slice_widths[index]
            a, b = noise(rank, layer.slots.a.shape[-1]), noise(width, rank)
            modules[f"{parent}.{part}".lstrip(".")] = LoRAFactors(a, b, 1.5)
    return Adapter("everywhere", modules)


def merged(base: nn.Module, adapter: Adapter) -> nn.Module:
    """The model with the adapter added to its weights."""
    model = copy.deepcopy(base)
    weights = dict(model.named_parameters())
    with torch.no_grad():
        for name, factors in adapter.modules.items():
            weight = weights[name if name in weights else f"{name}.weight"]
            weight += factors.scale * factors.b @ factors.a
    return model


@pytest.mark.parametrize("kind", ["qwen3_moe", "qwen3_next"])
def test_an_adapter_of_all_modules_gives_the_logits_of_merged_weights(kind: str) -> None:
    base = tiny_model(kind, num_hidden_layers=2, mlp_only_layers=[1])
    sizes = {"max_requests": 2, "max_length": 8, "max_prompt_tokens": 8}
    decoder = Decoder(copy.deepcopy(base), num_slots=2, rank=3, lm_head=True, **sizes)
    adapter = everywhere(decoder.layers, rank=3)
    slots = [decoder.slots.activate(adapter), -1]
    prompts, tokens = PROMPTS[:2], [4, 9]
    steps = [decoder.prefill(prompts, slots, first_line=0)]
    steps.append(decoder.decode(tokens, [len(prompt) for prompt in prompts], slots))
    for row, model in enumerate((merged(base, adapter), base)):
        whole = torch.tensor([[*prompts[row], tokens[row]]])
        with torch.no_grad():
            expected = model(input_ids=whole, use_cache=False).logits[0, -2:]
        assert_close(torch.stack([logits[row] for logits in steps]), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_base_requests_get_the_tokens_that_transformers_gives_them_alone(kind: str) -> None:
    base = tiny_model(kind)
    decoder = Decoder(
        copy.deepcopy(base),
        num_slots=2,
        rank=3,
        max_requests=3,
        max_length=16,
        max_prompt_tokens=9,
    )
    config = transformers.GenerationConfig(max_new_tokens=3, eos_token_id=list(range(24)))
    prompts = PROMPTS
    answers = generate(decoder, [Request(tuple(prompt)) for prompt in prompts], config)
    for prompt, answer in zip(prompts, answers, strict=True):
        ids = torch.tensor([prompt])
        out = base.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
        assert answer == out[0, len(prompt) :].tolist()
    # some end early, so that requests move to other lines
    assert len({len(answer) for answer in answers}) > 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_get_router_weights_in_fp32_whatever_the_dtype_of_the_router(
    dtype: torch.dtype,
) -> None:
    given: list[Tensor] = []

    def layer(x: Tensor, ids: Tensor, weights: Tensor, *buffers: None) -> Tensor:
        given.append(weights)
        return x

    none: Any = SimpleNamespace(batch=None, pairs=lambda layer: None, experts=lambda layer: None)
    experts: Any = layer
    place: Any = SimpleNamespace(get=lambda: none)
    weights = torch.tensor([[0.25, 0.75]], dtype=dtype)
    ServedExperts(experts, place)(torch.ones(1, 4), torch.tensor([[0, 1]]), weights)
    assert given[0].dtype == torch.float32
    assert torch.equal(given[0], weights.float())
