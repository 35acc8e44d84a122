"""What a decoder puts in place of a model's modules, its cache and its refusals."""

from __future__ import annotations

import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("transformers", minversion="5.23")

from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from lorakernels.adapters.adapter import Adapter
from lorakernels.adapters.errors import AdapterError
from lorakernels.dense.weights import LoRAFactors
from lorakernels.serving import cache
from lorakernels.serving.cache import RequestCache
from lorakernels.serving.decoder import Decoder
from lorakernels.serving.replace import replace_layers
from lorakernels.serving.tiny import KINDS, tiny_model

SIZES = {"num_slots": 2, "rank": 2, "max_requests": 3, "max_length": 8, "max_prompt_tokens": 12}
ATTENTION = "model.layers.1.self_attn"


def small_decoder(kind: str, **changes: Any) -> Decoder:
    return Decoder(tiny_model(kind), **(SIZES | changes))


def storages(tensors: Any) -> dict[int, int]:
    """Bytes of each distinct storage, by its address."""
    found = [tensor.untyped_storage() for tensor in tensors]
    return {storage.data_ptr(): storage.nbytes() for storage in found}


def test_a_layer_of_another_type_is_refused_by_it() -> None:
    assert cache.layer_types(tiny_model("qwen3_next").config) == [
        "linear_attention",
        "full_attention",
    ]
    # transformers itself may refuse it where it is set
    other: Any = SimpleNamespace(num_hidden_layers=2, layer_types=["full_attention", "chunked"])
    message = r"layer_types may have full_attention and linear_attention \(got chunked\)"
    with pytest.raises(ValueError, match=message):
        cache.layer_types(other)
    other.layer_types = None
    assert cache.layer_types(other) == ["full_attention", "full_attention"]


@pytest.mark.parametrize(("prompt_tokens", "rows"), [(16, 32), (32, 32), (33, 33)])
def test_the_buffers_hold_a_step_with_the_drafts_of_all_requests_and_the_longest_prompts(
    prompt_tokens: int, rows: int
) -> None:
    sizes = {"max_requests": 8, "max_prompt_tokens": prompt_tokens, "num_drafts": 3}
    assert small_decoder("qwen3", **sizes).buffers.max_tokens == rows


@pytest.mark.parametrize("kind", KINDS)
def test_each_weight_of_the_model_exists_once_after_it_was_replaced(kind: str) -> None:
    model = tiny_model(kind, tie_word_embeddings=True, attention_bias=True)
    before = storages(model.parameters())
    originals = [
        weakref.ref(weight)
        for name, weight in model.named_parameters()
        if ".q_proj." in name or ".in_proj_qkvz." in name
    ]
    replace_layers(model, num_slots=2, rank=2, lm_head=True, embed_tokens=True)
    after = storages(model.parameters())
    assert sum(after.values()) == sum(before.values())
    assert model.model.embed_tokens.layer.weight.data_ptr() in after
    assert originals
    assert all(original() is None for original in originals)


def test_modules_of_one_layer_must_be_called_in_their_order_with_one_tensor() -> None:
    attention = small_decoder("qwen3").model.get_submodule(ATTENTION)
    x, other = torch.randn(1, 1, 32), torch.randn(1, 1, 32)
    decoder_rows = torch.tensor([-1], dtype=torch.int32)
    attention.packed_qkv_proj._place.get().batch.prepare(decoder_rows)
    wrong_order = rf"{ATTENTION}.qkv_proj: v_proj must be called right after k_proj"
    with pytest.raises(RuntimeError, match="k_proj must be called right after q_proj"):
        attention.k_proj(x)
    attention.q_proj(x)
    with pytest.raises(RuntimeError, match=wrong_order):
        attention.v_proj(x)
    with pytest.raises(RuntimeError, match="with the same tensor"):
        attention.k_proj(other)
    attention.k_proj(x)
    with pytest.raises(RuntimeError, match="k_proj must be called right after q_proj"):
        attention.k_proj(x)
    # a pass that was broken off leaves nothing that a later one could take for its own
    q, k, v = attention.q_proj(other), attention.k_proj(other), attention.v_proj(other)
    assert (q.shape[-1], k.shape[-1], v.shape[-1]) == (64, 32, 32)
    with pytest.raises(RuntimeError, match="with the same tensor"):
        attention.k_proj(other)


def test_a_pass_that_was_broken_off_is_computed_again_from_what_its_tensor_holds_then() -> None:
    attention = small_decoder("qwen3").model.get_submodule(ATTENTION)
    attention.packed_qkv_proj._place.get().batch.prepare(torch.tensor([-1], dtype=torch.int32))
    modules = attention.q_proj, attention.k_proj, attention.v_proj
    x, later = torch.randn(1, 1, 32), torch.randn(1, 1, 32)
    wanted = [module(later) for module in modules]
    attention.q_proj(x)
    # as buffers of steps are
    x.copy_(later)
    assert all(torch.equal(module(x), each) for module, each in zip(modules, wanted, strict=True))


def test_modules_of_one_layer_keep_neither_their_input_nor_their_columns() -> None:
    attention = small_decoder("qwen3").model.get_submodule(ATTENTION)
    attention.packed_qkv_proj._place.get().batch.prepare(torch.tensor([-1], dtype=torch.int32))
    x = torch.randn(1, 1, 32)
    columns = [module(x) for module in (attention.q_proj, attention.k_proj, attention.v_proj)]
    kept = [weakref.ref(each) for each in (x, *columns)]
    del x, columns
    assert [each() for each in kept] == [None] * 4


class OtherEmbedding(nn.Embedding):
    """An embedding that computes something else, such as scaled rows."""


class OtherLinear(nn.Linear):
    """A linear that computes something else, as quantised ones do."""


def broken(kind: str, change: str) -> PreTrainedModel:
    model = tiny_model(kind)
    layer = model.model.layers[1]
    if change == "subclass":
        layer.self_attn.o_proj = OtherLinear(64, 32, bias=False)
    elif change == "unlike":
        layer.self_attn.k_proj = nn.Linear(32, 32, bias=True)
    elif change == "first unlike":
        layer.self_attn.q_proj = nn.Linear(32, 64, bias=True)
    elif change == "extra":
        layer.mlp.gate_of_my_own = nn.Linear(32, 1)
    elif change == "parameter":
        layer.mlp.register_parameter("scale", nn.Parameter(torch.ones(1)))
    elif change == "missing":
        del layer.self_attn.q_proj
    elif change in ("gelu", "tanh"):
        layer.mlp.experts.config.hidden_act = change
    elif change == "shape":
        layer.mlp.experts.down_proj = nn.Parameter(torch.ones(4, 16, 32))
    elif change == "meta":
        model.model.layers[1].to("meta")
    elif change == "rows":
        model.model.embed_tokens = OtherEmbedding(64, 32)
    elif change == "norm":
        model.model.embed_tokens.max_norm = 2.0
    elif change == "meta rows":
        model.model.embed_tokens.to("meta")
    elif change == "meta experts":
        layer.mlp.experts.to("meta")
    elif change == "bias":
        for module in ("in_proj_qkvz", "in_proj_ba"):
            linear = getattr(model.model.layers[0].linear_attn, module)
            linear.bias = nn.Parameter(torch.zeros(linear.out_features))
    return model


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        ("qwen3", "subclass", rf"{ATTENTION}.o_proj must be a torch.nn.Linear .got OtherLinear"),
        ("qwen3", "unlike", rf"{ATTENTION}.k_proj must be like {ATTENTION}.q_proj"),
        ("qwen3", "first unlike", rf"{ATTENTION}.k_proj must be like {ATTENTION}.q_proj"),
        ("qwen3", "missing", rf"{ATTENTION}.q_proj must be a torch.nn.Linear .got NoneType"),
        ("qwen3", "extra", r"model.layers.1.mlp.gate_of_my_own: a Linear here is not known"),
        ("qwen3", "parameter", r"model.layers.1.mlp: a Qwen3MLP here is not known"),
        ("qwen3", "meta", r"model.layers.1.\S+ must have weights"),
        (
            "qwen3_moe",
            "gelu",
            r"model.layers.0.mlp.experts must have the activation silu \(got gelu\)",
        ),
        (
            "qwen3_moe",
            "tanh",
            r"model.layers.0.mlp.experts must have the activation silu \(got tanh\)",
        ),
        ("qwen3_next", "shape", r"model.layers.1.mlp.experts must have gate_up_proj"),
        ("qwen3", "rows", r"model.embed_tokens must be a torch.nn.Embedding .got OtherEmbedding"),
        ("qwen3", "norm", r"model.embed_tokens must have no max_norm .got 2.0"),
        ("qwen3", "meta rows", r"model.embed_tokens must have weights"),
        ("qwen3_moe", "meta experts", r"model.layers.1.mlp.experts must have weights"),
        ("qwen3_next", "bias", r"model.layers.0.linear_attn.in_proj_qkvz must have no bias"),
    ],
)
def test_a_module_that_is_not_known_is_refused_by_name_and_nothing_is_replaced(
    kind: str, change: str, message: str
) -> None:
    model = broken(kind, change)
    before = {name: type(module) for name, module in model.named_modules()}
    with pytest.raises(ValueError, match=message):
        replace_layers(model, num_slots=2, rank=2, embed_tokens=True)
    assert {name: type(module) for name, module in model.named_modules()} == before


def test_a_model_without_a_decoder_says_what_reserves_its_buffers() -> None:
    model = tiny_model("qwen3")
    replace_layers(model, num_slots=2, rank=2)
    with pytest.raises(RuntimeError, match="no buffers yet; a Decoder reserves them"):
        model(torch.zeros(1, 2, dtype=torch.int64))


def test_the_head_and_the_embedding_are_replaced_on_request_only() -> None:
    model = tiny_model("qwen3")
    replaced = replace_layers(model, num_slots=2, rank=2)
    assert {"lm_head", "model.embed_tokens"}.isdisjoint(replaced.layers)
    assert type(model.model.embed_tokens) is nn.Embedding


def test_an_adapter_of_the_embedding_is_refused_where_that_was_not_asked_for() -> None:
    modules = {"model.embed_tokens": LoRAFactors(torch.ones(2, 64), torch.ones(32, 2), 1.0)}
    adapter = Adapter("tokens", modules)
    with pytest.raises(AdapterError, match=r"modules that the model does not serve.*embed_tokens"):
        small_decoder("qwen3").slots.activate(adapter)
    assert small_decoder("qwen3", embed_tokens=True).slots.activate(adapter) == 0


def test_a_model_of_another_architecture_is_refused() -> None:
    config = LlamaConfig(
        vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1
    )
    with pytest.raises(ValueError, match=r"Qwen3ForCausalLM, .* \(got LlamaForCausalLM\)"):
        replace_layers(LlamaForCausalLM(config), num_slots=2, rank=2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"use_sliding_window": True, "sliding_window": 4}, "sliding_window must be None .got 4"),
        (
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
            "rope_type must not depend on the lengths in a batch",
        ),
    ],
)
def test_a_model_whose_rows_would_depend_on_their_batch_is_refused(
    changes: dict[str, Any], message: str
) -> None:
    model = tiny_model("qwen3", **changes)
    with pytest.raises(ValueError, match=message):
        Decoder(model, **SIZES)
    assert type(model.model.layers[0].self_attn.q_proj) is nn.Linear


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"max_requests": 0}, "max_requests must be an integer of at least 1 .got 0"),
        ({"max_length": 0}, "max_length must be an integer of at least 1 .got 0"),
        ({"max_prompt_tokens": 0}, "max_prompt_tokens must be an integer of at least 1 .got 0"),
        ({"max_requests": 2.0}, "max_requests must be an integer of at least 1 .got 2.0"),
        ({"graph_sizes": [1, 4]}, "sizes must be 1 to 3, which is max_tokens .got 4"),
    ],
)
def test_sizes_that_make_no_sense_are_refused_before_the_model_is_changed(
    sizes: dict[str, Any], message: str
) -> None:
    model = tiny_model("qwen3")
    with pytest.raises(ValueError, match=message):
        Decoder(model, **(SIZES | sizes))
    assert type(model.model.layers[0].self_attn.q_proj) is nn.Linear


def cache_tensors(cache: RequestCache) -> list[Tensor]:
    held = []
    for layer in cache.layers:
        if hasattr(layer, "conv_states"):
            held += [layer.conv_states[0], layer.recurrent_states[0]]
        else:
            held += [layer.keys, layer.values]
    return held


# padded to the longest, all of one length, and one alone
@pytest.mark.parametrize("prompts", [[[1, 2, 3], [4], [5, 6]], [[1, 2], [4, 5], [6, 3]], [[7]]])
def test_the_line_of_each_prompt_holds_nothing_of_an_earlier_request_behind_it(
    prompts: list[list[int]],
) -> None:
    decoder = small_decoder("qwen3")
    tensors = cache_tensors(decoder.cache)
    for held in tensors:
        held.fill_(torch.nan)
    decoder.prefill(prompts, [-1] * len(prompts), first_line=0)
    for held in tensors:
        for line, prompt in zip(held, prompts, strict=False):
            assert not line[:, len(prompt) :].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_recurrent_state_of_a_delta_net_is_in_fp32_whatever_the_model_is_in(
    dtype: torch.dtype,
) -> None:
    decoder = Decoder(tiny_model("qwen3_next").to(dtype), **SIZES)
    held = [layer for layer in decoder.cache.layers if hasattr(layer, "conv_states")]
    assert held
    assert {layer.recurrent_states[0].dtype for layer in held} == {torch.float32}
    assert {layer.conv_states[0].dtype for layer in held} == {dtype}


def test_the_cache_says_how_many_bytes_it_takes_and_never_moves() -> None:
    decoder = small_decoder("qwen3_next")
    before = storages(cache_tensors(decoder.cache))
    keys = 2 * 3 * 2 * 8 * 16 * 4
    states = 3 * (2 * 16 + 32) * 4 * 4 + 3 * 4 * 8 * 8 * 4
    assert decoder.cache.num_bytes == sum(before.values()) == keys + states
    decoder.prefill([[1, 2], [3]], [-1, -1], first_line=1)
    decoder.decode([1, 2, 3], [0, 2, 1], [-1, -1, -1])
    decoder.cache.move(2, 0)
    assert storages(cache_tensors(decoder.cache)) == before


def test_delta_nets_are_refused_with_a_version_of_transformers_that_is_too_old(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # of the module that the cache has: another one may have taken its name since
    monkeypatch.setattr(vars(cache)["transformers"], "__version__", "5.22.1")
    small_decoder("qwen3")
    with pytest.raises(ValueError, match=r"transformers must be 5.23 or newer .* .got 5.22.1"):
        small_decoder("qwen3_next")


def test_a_state_that_a_delta_net_does_not_have_is_refused() -> None:
    decoder = small_decoder("qwen3_next")
    decoder.decode([1, 2, 3], [0, 0, 0], [-1, -1, -1])
    layer = next(i for i, held in enumerate(decoder.cache.layers) if hasattr(held, "conv_states"))
    for state in (decoder.cache.get_conv_state, decoder.cache.get_recurrent_state):
        assert state(layer, 0) is not None
        with pytest.raises((IndexError, KeyError)):
            state(layer, 1)


@pytest.mark.parametrize("prompts", [[[4, 5], [6]], [[4, 5], [6, 3]]])
@pytest.mark.parametrize("kind", ["qwen3", "qwen3_next"])
def test_a_prompt_finds_nothing_of_an_earlier_request_in_its_line(
    kind: str, prompts: list[list[int]]
) -> None:
    decoder = small_decoder(kind)
    tokens = [9, 8, 7], [1, *map(len, prompts)]

    def run() -> Tensor:
        first = decoder.prefill(prompts, [-1, -1], first_line=1)
        # row 0 is a line of another request
        step = decoder.decode(*tokens, [-1, -1, -1])[1:]
        return torch.cat([first, step])

    expected = run()
    for tensor in cache_tensors(decoder.cache):
        tensor[1:].fill_(float("nan"))
    assert torch.equal(run(), expected)


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_next"])
def test_a_request_goes_on_in_another_line_as_in_its_own(kind: str) -> None:
    decoder = small_decoder(kind)
    decoder.prefill([[4, 5], [6, 2, 3], [7]], [-1, -1, -1], first_line=0)
    rows = ([9, 8, 1], [2, 3, 1], [-1, -1, -1])
    before = [tensor.clone() for tensor in cache_tensors(decoder.cache)]
    expected = decoder.decode(*rows).clone()
    for tensor, copied in zip(cache_tensors(decoder.cache), before, strict=True):
        tensor.copy_(copied)
    decoder.cache.move(2, 0)
    found = decoder.decode([1, 8], [1, 3], [-1, -1])
    # the same rows in a batch of another size: sums may be added up in another order
    torch.testing.assert_close(found, expected[[2, 1]], rtol=1e-4, atol=1e-4)
    assert not torch.allclose(expected[2], expected[0], atol=1e-2)


def noted_mappings(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The slots of the rows, each time that the buffers are prepared."""
    noted: list[list[int]] = []
    batch = decoder.buffers.batch
    prepare = type(batch).prepare

    def noting(token_slots: Tensor, **options: Any) -> None:
        noted.append(token_slots.tolist())
        prepare(batch, token_slots, **options)

    monkeypatch.setattr(batch, "prepare", noting)
    return noted


def test_rows_have_the_slot_of_their_request_and_padding_is_of_the_base_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    decoder = small_decoder("qwen3")
    noted = noted_mappings(decoder, monkeypatch)
    decoder.prefill([[4], [6, 2, 3], [7, 5]], [1, -1, 0], first_line=0)
    decoder.decode([9, 8, 1], [1, 3, 2], [1, -1, 0])
    decoder.decode([4, 5], [2, 4], [0, 1])
    tokens = [-1, -1, 1, -1, -1, -1, -1, 0, 0]
    assert noted == [tokens, [1, -1, 0], [1, -1, 0], [0, 1]]


class NoReadBack(TorchDispatchMode):
    """Refuses what would make the host wait for the device, or whose size depends on data."""

    REFUSED = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "is_nonzero", "equal")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        assert name not in self.REFUSED, f"{name} reads the device"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_reads_nothing_back_from_the_device(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = small_decoder(kind)
    decoder.prefill([[4], [6, 2, 3]], [-1, -1], first_line=0)
    decoder.decode([9, 8], [1, 3], [-1, -1])
    # the interpreter itself looks at every value
    for layer in decoder.layers.values():
        monkeypatch.setattr(layer, "forward", plain_forward(layer))
    with NoReadBack():
        decoder.step(2)


def plain_forward(layer: Any) -> Any:
    """The shapes of a layer's result, without its kernels."""
    if hasattr(layer, "w13"):
        return lambda x, *args, **options: x.clone()

    def forward(x: Tensor, *args: Any, **options: Any) -> Any:
        out = x @ layer.weight.T
        if not hasattr(layer, "qkvz_features"):
            return out
        return out[..., : layer.qkvz_features], out[..., layer.qkvz_features :]

    return forward


def test_every_token_of_a_prompt_pass_sees_something_and_no_live_one_sees_padding(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    decoder = small_decoder("qwen3")
    seen = []
    body = decoder._body

    def looked_at(ids: Tensor, positions: Tensor, visible: Tensor, live: Tensor) -> Tensor:
        seen.append((visible[:, 0], live))
        return body(ids, positions, visible, live)

    monkeypatch.setattr(decoder, "_body", looked_at)
    decoder.prefill([[1, 2, 3], [4]], [-1, -1], first_line=0)
    ((visible, live),) = seen
    # a softmax over nothing is NaN in some implementations of attention, and zero in others
    assert visible.any(-1).all()
    assert live.tolist() == [[True] * 3, [False, False, True]]
    earlier = torch.ones(3, 3).tril().bool()
    assert torch.equal(visible, earlier & live[:, None] | torch.eye(3, dtype=torch.bool))


@pytest.mark.parametrize(
    ("prompts", "first_line", "message"),
    [
        ([], 0, "prompts must have a token each"),
        ([[1], []], 0, "prompts must have a token each"),
        ([[1] * 5, [1], [1]], 0, "may have 12 tokens, with padding .got 15"),
        ([[1] * 9], 0, "prompts may have 8 tokens .got 9"),
        ([[1], [1]], 2, "must fit into 3 lines .got 2 from line 2 on"),
        ([[1], [1]], -1, "must fit into 3 lines .got 2 from line -1 on"),
    ],
)
def test_prompts_that_do_not_fit_are_refused(
    prompts: list[list[int]], first_line: int, message: str
) -> None:
    decoder = small_decoder("qwen3")
    with pytest.raises(ValueError, match=message):
        decoder.prefill(prompts, [-1] * len(prompts), first_line=first_line)


@pytest.mark.parametrize("positions", [[], [0] * 4, [8], [-1], [3, -1], [0, 8], [8, 0]])
def test_a_step_outside_the_cache_is_refused(positions: list[int]) -> None:
    decoder = small_decoder("qwen3")
    with pytest.raises(ValueError, match=r"a step may have 3 rows|positions must be 0 to 7"):
        decoder.decode([1] * len(positions), positions, [-1] * len(positions))
