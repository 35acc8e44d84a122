"""What a decoder refuses before it changes its model, and tokens that it refuses before it runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from packaging.version import Version
from torch import nn

pytest.importorskip("transformers", minversion="5.23")

from lorakernels.serving import cache
from lorakernels.serving.decoder import Decoder
from lorakernels.serving.tiny import tiny_model

SIZES = {"num_slots": 2, "rank": 2, "max_requests": 3, "max_length": 8, "max_prompt_tokens": 12}


def test_models_with_delta_nets_need_a_transformers_that_is_new_enough_and_are_left_as_they_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cache, "_OLDEST", Version("99"))
    model = tiny_model("qwen3_next")
    with pytest.raises(ValueError, match="transformers must be 99 or newer"):
        Decoder(model, **SIZES)
    assert type(model.model.layers[0].linear_attn.out_proj) is nn.Linear
    # others do not ask for it
    Decoder(tiny_model("qwen3"), **SIZES)


@pytest.mark.parametrize(
    ("kind", "module", "dtype", "message"),
    [
        ("qwen3", "layers.1.mlp.down_proj", torch.bfloat16, "must be torch.float32 on cpu like"),
        ("qwen3", "layers.1.mlp.down_proj", torch.float64, "must be float16, bfloat16 or float32"),
        ("qwen3_moe", "layers.0.mlp.experts", torch.bfloat16, "must be torch.float32 on cpu like"),
    ],
)
def test_layers_of_several_dtypes_are_refused_before_the_model_is_changed(
    kind: str, module: str, dtype: torch.dtype, message: str
) -> None:
    model = tiny_model(kind)
    model.model.get_submodule(module).to(dtype)
    with pytest.raises(ValueError, match=rf"model\.{module} {message}"):
        Decoder(model, **SIZES)
    assert type(model.model.layers[0].self_attn.q_proj) is nn.Linear


@pytest.mark.parametrize("name", ["gate_up_proj", "down_proj"])
def test_experts_of_two_dtypes_are_refused_before_the_model_is_changed(name: str) -> None:
    model = tiny_model("qwen3_moe")
    experts = model.model.layers[1].mlp.experts
    parameter = getattr(experts, name)
    parameter.data = parameter.data.bfloat16()
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.experts must be torch.float32 on cpu"):
        Decoder(model, **SIZES)
    assert type(model.model.layers[0].self_attn.q_proj) is nn.Linear


@pytest.mark.parametrize("token", [-1, 64, 1.0])
def test_tokens_that_the_vocabulary_lacks_are_refused_before_the_model_runs(token: Any) -> None:
    decoder = Decoder(tiny_model("qwen3"), num_drafts=1, **SIZES)
    assert decoder.config.vocab_size == 64
    decoder.prefill([[1, 63]], [-1], first_line=0)
    message = rf"tokens must be integers from 0 to 63 \(got {token}\)"
    with pytest.raises(ValueError, match=message):
        decoder.prefill([[1, token]], [-1], first_line=0)
    with pytest.raises(ValueError, match=message):
        decoder.decode([token], [2], [-1])
    with pytest.raises(ValueError, match=message):
        decoder.verify([[1, token]], [2], [-1])


def doubled(call: Any) -> Any:
    return lambda *arguments: call(*arguments) * 2


@pytest.mark.parametrize("how", ["hook", "pre-hook", "forward"])
@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("qwen3", "model.layers.1.self_attn.v_proj"),
        ("qwen3", "model.layers.0.mlp.down_proj"),
        ("qwen3", "model.embed_tokens"),
        ("qwen3", "lm_head"),
        ("qwen3_moe", "model.layers.1.mlp.experts"),
        ("qwen3_next", "model.layers.0.linear_attn.in_proj_ba"),
    ],
)
def test_modules_whose_calls_do_more_than_their_class_says_are_refused(
    kind: str, name: str, how: str
) -> None:
    model = tiny_model(kind)
    module = model.get_submodule(name)
    if how == "hook":
        module.register_forward_hook(lambda module, inputs, output: output * 2)
    elif how == "pre-hook":
        module.register_forward_pre_hook(lambda module, inputs: None)
    else:
        module.forward = doubled(module.forward)
    with pytest.raises(ValueError, match=f"{name} must have no hooks and no forward of its own"):
        Decoder(model, lm_head=True, embed_tokens=True, **SIZES)
    assert type(model.model.layers[1].self_attn.q_proj) is nn.Linear


def test_experts_of_a_subclass_are_refused_like_linears_of_one() -> None:
    model = tiny_model("qwen3_moe")
    experts = model.model.layers[1].mlp.experts
    experts.__class__ = type("OtherExperts", (type(experts),), {"forward": lambda *_: None})
    with pytest.raises(
        ValueError, match=r"layers\.1\.mlp\.experts: a OtherExperts here is not known"
    ):
        Decoder(model, **SIZES)


def test_arguments_for_other_numbers_of_requests_are_refused_with_both_numbers() -> None:
    decoder = Decoder(tiny_model("qwen3"), num_drafts=1, **SIZES)
    with pytest.raises(ValueError, match=r"must be equally many \(got 2 prompts, 1 slots\)"):
        decoder.prefill([[1], [2]], [-1], first_line=0)
    decoder.prefill([[1], [2]], [-1, -1], first_line=0)
    with pytest.raises(ValueError, match=r"\(got 2 tokens, 1 positions, 2 slots\)"):
        decoder.decode([3, 4], [1], [-1, -1])
    with pytest.raises(ValueError, match=r"\(got 1 tokens, 2 positions, 2 slots\)"):
        decoder.verify([[3]], [1, 1], [-1, -1])


@pytest.mark.parametrize("size", [1.5, "2", None, True, -1])
@pytest.mark.parametrize("name", [*SIZES, "num_drafts"])
def test_sizes_that_are_no_numbers_are_refused_before_the_model_is_changed(
    name: str, size: Any
) -> None:
    model = tiny_model("qwen3")
    with pytest.raises(ValueError, match=rf"{name} must be an integer of at least \d \(got {size}"):
        Decoder(model, **(SIZES | {name: size}))
    assert type(model.model.layers[0].self_attn.q_proj) is nn.Linear


def test_sizes_of_graphs_may_come_from_an_iterator() -> None:
    graph_sizes: Any = iter([1, 2])
    decoder = Decoder(tiny_model("qwen3"), graph_sizes=graph_sizes, **SIZES)
    assert {key.num_tokens for key in decoder.runner._planned} == {1, 2}
