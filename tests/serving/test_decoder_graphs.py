"""Decode steps of a decoder that are replayed give what eager steps give."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers", minversion="5.23")

from transformers import GenerationConfig

from lorakernels.adapters.adapter import Adapter
from lorakernels.dense.weights import LoRAFactors
from lorakernels.runtime.graphs import Captured
from lorakernels.serving import graph_runner
from lorakernels.serving.decoder import Decoder
from lorakernels.serving.generation import Request, generate
from lorakernels.serving.speculation import NgramDrafts
from lorakernels.serving.tiny import tiny_model

SIZES = {"num_slots": 2, "rank": 2, "max_requests": 4, "max_length": 12, "max_prompt_tokens": 12}


class RepeatingPool:
    """Graphs of a device without: a replay makes the captured call once more."""

    replays = 0

    def __init__(self, module: object, device: torch.device) -> None:
        pass

    def capture(self, call: Callable[[], Tensor], *, warm_ups: int) -> Captured[Tensor]:
        # a dummy run takes seconds in the interpreter: one is enough to leave something behind
        result = call()

        def replay() -> None:
            RepeatingPool.replays += 1
            result.copy_(call())

        return Captured(SimpleNamespace(replay=replay), result)


def test_replayed_steps_with_padded_rows_give_the_tokens_of_eager_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # of all kinds of layers
    kind = "qwen3_next"
    prompts = [(3, 5, 9), (7,), (11, 12, 13), (2, 4), (1,)]
    requests = [Request(prompt) for prompt in prompts]
    config = GenerationConfig(max_new_tokens=4, eos_token_id=list(range(16)))
    expected = generate(Decoder(tiny_model(kind), **SIZES), requests, config)
    monkeypatch.setattr(graph_runner, "graph_module", lambda device: object())
    monkeypatch.setattr(graph_runner, "GraphPool", RepeatingPool)
    # steps of up to 2 rows are padded, and those of 4 run eagerly
    decoder = Decoder(tiny_model(kind), graph_sizes=[3], **SIZES)
    decoder.capture()
    before = RepeatingPool.replays
    assert generate(decoder, requests, config) == expected
    assert RepeatingPool.replays > before
    assert len({len(answer) for answer in expected}) > 1


def of_tokens(name: str, seed: int) -> Adapter:
    """An adapter that changes the embedding alone."""
    made = torch.Generator().manual_seed(seed)
    a, b = (torch.randn(*shape, generator=made) for shape in ((2, 64), (32, 2)))
    return Adapter(name, {"model.embed_tokens": LoRAFactors(a, b, 0.5)})


def logits_of_merged_weights(adapter: Adapter | None, tokens: list[int]) -> Tensor:
    """Of the token behind each of `tokens`."""
    model = tiny_model("qwen3", num_hidden_layers=1)
    with torch.no_grad():
        for factors in adapter.modules.values() if adapter else ():
            model.model.embed_tokens.weight += factors.scale * (factors.b @ factors.a).T
        logits: Tensor = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]
    return logits


@pytest.mark.parametrize("graph_sizes", [[], [4]], ids=["eager", "graphs"])
def test_a_step_looks_its_ids_up_in_the_adapters_of_its_rows(
    graph_sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    if graph_sizes:
        monkeypatch.setattr(graph_runner, "graph_module", lambda device: object())
        monkeypatch.setattr(graph_runner, "GraphPool", RepeatingPool)
    model = tiny_model("qwen3", num_hidden_layers=1)
    decoder = Decoder(model, graph_sizes=graph_sizes, embed_tokens=True, **SIZES)
    decoder.capture()
    adapters = [of_tokens("one", 1), of_tokens("two", 2), None]
    slots = [decoder.slots.activate(adapter) for adapter in adapters if adapter] + [-1]
    texts, before = [[3, 5, 9], [7], [11, 12]], RepeatingPool.replays
    found = [decoder.prefill(texts, slots, first_line=0)]
    # a row less each time: the others of a graph are padding, in which ids of the last step lie
    for own in ([8, 0, 63], [3, 63], [0]):
        rows = len(own)
        positions = [len(text) for text in texts[:rows]]
        found.append(decoder.decode(own, positions, slots[:rows]).clone())
        for text, token in zip(texts, own, strict=False):
            text.append(token)
    assert (RepeatingPool.replays > before) is bool(graph_sizes)
    for row, (text, adapter) in enumerate(zip(texts, adapters, strict=True)):
        mine = torch.stack([logits[row] for logits in found if row < len(logits)])
        expected = logits_of_merged_weights(adapter, text)[-len(mine) :]
        torch.testing.assert_close(mine, expected, rtol=1e-4, atol=1e-4)
        if adapter:
            alone = logits_of_merged_weights(None, text)[-len(mine) :]
            assert (expected - alone).abs().max() > 0.1


def test_replayed_verifications_with_padded_requests_give_the_tokens_of_decode_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def model() -> Any:
        return tiny_model("qwen3", num_hidden_layers=1)

    # texts that repeat, and one of which nothing can be drafted
    requests = [Request(prompt) for prompt in ((3, 5, 3, 5, 3), (7, 7, 7), (11, 12))]
    config = GenerationConfig(max_new_tokens=5, eos_token_id=[])
    expected = generate(Decoder(model(), **SIZES), requests, config)
    monkeypatch.setattr(graph_runner, "graph_module", lambda device: object())
    monkeypatch.setattr(graph_runner, "GraphPool", RepeatingPool)
    decoder = Decoder(model(), graph_sizes=[4], num_drafts=2, **(SIZES | {"max_prompt_tokens": 15}))
    decoder.capture()
    assert {(key.num_tokens, key.width) for key in decoder.runner.keys} == {(12, 3), (4, 1)}
    before = RepeatingPool.replays
    assert generate(decoder, requests, config, drafter=NgramDrafts()) == expected
    assert RepeatingPool.replays > before


SCRIPT = """
import copy
import torch
from transformers import GenerationConfig
from lorakernels.adapters.adapter import Adapter
from lorakernels.dense.weights import LoRAFactors
from lorakernels.layers.moe import FusedMoELoRA
from lorakernels.moe.weights import ExpertFactors
from lorakernels.serving.decoder import Decoder
from lorakernels.serving.generation import Request, generate
from lorakernels.serving.speculation import NgramDrafts
from lorakernels.serving.tiny import KINDS, tiny_model

SIZES = dict(num_slots=3, rank=16, max_requests=6, max_length=32, max_prompt_tokens=96)


def adapter(decoder, name, rank, seed):
    made, modules = torch.Generator().manual_seed(seed), {}

    def noise(*shape):
        return torch.randn(shape, generator=made) * 0.5 * shape[-1] ** -0.5

    for layer_name, layer in decoder.layers.items():
        parent = layer_name.rpartition(".")[0]
        if isinstance(layer, FusedMoELoRA):
            hidden, inner = layer.packing.hidden, layer.packing.intermediate
            for part, (n, k) in dict(
                gate_up_proj=(2 * inner, hidden), down_proj=(hidden, inner)
            ).items():
                factors = ExpertFactors(noise(4, rank, k), noise(4, n, rank), 0.7)
                modules[f"{layer_name}.{part}"] = factors
            continue
        for part, (index,) in layer.parts.items():
            a = noise(rank, layer.slots.a.shape[-1])
            b = noise(layer.slots.slice_widths[index], rank)
            modules[f"{parent}.{part}".lstrip(".")] = LoRAFactors(a, b, 1.5)
    return Adapter(name, modules)


def close(what, found, expected):
    error = float((found.float() - expected.float()).abs().max() / expected.float().abs().max())
    # products of fp32 may be rounded to TF32, with 10 bits, in each of some 16 products
    assert error < 16 * 2.0**-10, f"{what}: relative error {error}"


for kind in KINDS:
    torch.manual_seed(0)
    base = tiny_model(kind)
    decoders = [
        Decoder(
            copy.deepcopy(base).to("cuda"),
            graph_sizes=sizes, lm_head=True, embed_tokens=True, **SIZES
        )
        for sizes in ((1, 2, 4), ())
    ]
    replayed, eager = decoders
    replayed.capture()
    assert len(replayed.runner.keys) == 6, f"{kind}: captured {replayed.runner.keys}"
    assert not eager.runner.keys
    for decoder in decoders:
        for name, rank, seed in (("one", 4, 1), ("two", 16, 2), ("three", 9, 3)):
            decoder.slots.activate(adapter(decoder, name, rank, seed))
    prompts = [[3, 5, 9], [7], [11, 12, 13, 14, 15], [2, 4], [1, 1, 2], [60]]
    for slots in ([-1] * 6, [0, 1, 2, -1, 2, 0], [2] * 6, [-1, -1, 1, -1, -1, -1], [0, -1] * 3):
        for rows in range(1, 7):
            found = []
            for decoder in decoders:
                first = decoder.prefill(prompts[:rows], slots[:rows], first_line=0)
                steps = [first.clone()]
                for step in range(3):
                    tokens = [(7 * row + step) % 64 for row in range(rows)]
                    positions = [len(prompt) + step for prompt in prompts[:rows]]
                    # the second step: what is allocated once is there
                    torch.cuda.set_sync_debug_mode("error" if step else "default")
                    logits = decoder.decode(tokens, positions, slots[:rows])
                    torch.cuda.set_sync_debug_mode("default")
                    steps.append(logits.clone())
                found.append(torch.stack(steps))
            close(f"{kind}, {rows} rows of slots {slots}", *found)
        if slots[:2] == [0, 1]:
            mixed = found[0]
        elif slots == [-1] * 6:
            alone = found[0]
    change = (mixed - alone).abs().amax(dim=(0, 2))
    assert (change[[0, 1, 2, 4, 5]] > 0.05).all(), f"{kind}: adapters change too little: {change}"
    close(f"{kind}: base row in a mixed batch", mixed[:, 3], alone[:, 3])
    # another adapter in a slot that the graphs read
    for decoder in decoders:
        decoder.slots.evict("two")
        decoder.slots.activate(adapter(decoder, "four", 7, 4))
    requests = [Request(tuple(p), n) for p, n in zip(prompts, ("four", None, "one") * 2)]
    config = GenerationConfig(max_new_tokens=6)
    answers = [generate(decoder, requests, config) for decoder in decoders]
    if decoders[0].takes_back:
        drafting = Decoder(
            copy.deepcopy(base).to("cuda"),
            graph_sizes=(1, 2, 4, 6), lm_head=True, embed_tokens=True, num_drafts=3, **SIZES
        )
        drafting.capture()
        assert len(drafting.runner.keys) == 16, f"{kind}: captured {drafting.runner.keys}"
        for name, rank, seed in (("one", 4, 1), ("four", 7, 4)):
            drafting.slots.activate(adapter(drafting, name, rank, seed))
        # drafts of a text that the request has as an answer: some are right
        texts = [
            Request((*r.prompt, *a, *r.prompt), r.adapter) for r, a in zip(requests, answers[1])
        ]
        found = generate(drafting, texts, config, drafter=NgramDrafts())
        wanted = generate(eager, texts, config)
        equal = [one == other for one, other in zip(found, wanted)]
        assert sum(equal) >= 5, f"{kind}: with drafts {found}, without {wanted}"
    same = [one == other for one, other in zip(*answers)]
    # a token whose logit is nearly that of another may differ
    assert sum(same) >= 5, f"{kind}: answers {answers}"
    whole = torch.tensor([prompts[1] + answers[1][1]])
    with torch.no_grad():
        expected = base(input_ids=whole).logits[0, len(prompts[1]) - 1 : -1]
    chosen = expected.gather(1, torch.tensor(answers[1][1])[:, None])[:, 0]
    behind = (expected.amax(dim=1) - chosen) / expected.abs().max()
    assert (behind < 0.02).all(), f"{kind}: transformers on the CPU prefers others: {behind}"
    print(kind, "ok")
"""


@pytest.mark.skipif(not torch.cuda.is_available(), reason="captures CUDA graphs")
def test_captured_steps_on_a_gpu_give_the_logits_of_eager_steps(run_compiled: Any) -> None:
    run_compiled(SCRIPT)
