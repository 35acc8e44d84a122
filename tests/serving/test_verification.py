"""Steps that verify drafts, on tiny models: they give what decode steps give one by one."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers", minversion="5.23")

from transformers import GenerationConfig

from lorakernels.adapters.adapter import Adapter
from lorakernels.dense.weights import LoRAFactors
from lorakernels.serving.decoder import Decoder
from lorakernels.serving.generation import Generation, Request, generate
from lorakernels.serving.speculation import ModelDrafts, NgramDrafts
from lorakernels.serving.tiny import tiny_model

SIZES: dict[str, Any] = {
    "num_slots": 2,
    "rank": 4,
    "max_requests": 3,
    "max_length": 14,
    "max_prompt_tokens": 15,
    "lm_head": True,
}
# of queries, of an output and of the head
MODULES = {"model.layers.0.self_attn.q_proj": (32, 64), "model.layers.0.self_attn.o_proj": (64, 32)}
MODULES |= {"lm_head": (32, 64)}


def adapter(name: str, seed: int) -> Adapter:
    generator = torch.Generator().manual_seed(seed)

    def noise(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator) * shape[-1] ** -0.5

    return Adapter(
        name,
        {
            module: LoRAFactors(noise(1 + seed, k), noise(n, 1 + seed), 1.5)
            for module, (k, n) in MODULES.items()
        },
    )


def decoder(kind: str, **sizes: Any) -> Decoder:
    made = Decoder(tiny_model(kind, num_hidden_layers=1), **(SIZES | sizes))
    for seed, name in enumerate(("one", "two"), 1):
        made.slots.activate(adapter(name, seed))
    return made


# each launch takes a tenth of a second in the interpreter: one layer shows what several do
@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe"])
def test_a_verification_has_the_logits_of_decode_steps_whatever_was_rejected_before(
    kind: str,
) -> None:
    prompts, slots = [[3, 5, 9], [7], [11, 12]], [0, -1, 1]
    tokens = [[8, 1, 4], [6], [5, 3]]
    verifying, plain = decoder(kind, num_drafts=2), decoder(kind)
    for each in (verifying, plain):
        each.prefill(prompts, slots, first_line=0)
    # drafts of which none is kept
    verifying.verify([[8, 60, 61], [6, 62, 63], [5, 50]], [3, 1, 2], slots)
    found = verifying.verify(tokens, [3, 1, 2], slots).clone()
    for place in range(3):
        # a request without a token at this place repeats its last one
        at = [min(place, len(own) - 1) for own in tokens]
        positions = [len(prompt) + step for prompt, step in zip(prompts, at, strict=True)]
        given = [own[step] for own, step in zip(tokens, at, strict=True)]
        logits = plain.decode(given, positions, slots)
        for row, own in enumerate(tokens):
            if place < len(own):
                torch.testing.assert_close(found[row, place], logits[row], rtol=1e-4, atol=1e-4)


def test_the_last_token_of_a_line_is_verified_beside_requests_with_more_drafts() -> None:
    """Its places without a draft lie behind the longest request."""
    prompts, slots = [list(range(3, 16)), [7], [11, 12]], [0, -1, 1]
    tokens, positions = [[8], [6, 62, 63], [5]], [13, 1, 2]
    sizes = {"max_prompt_tokens": 39}
    verifying, plain = decoder("qwen3", num_drafts=2, **sizes), decoder("qwen3", **sizes)
    for each in (verifying, plain):
        each.prefill(prompts, slots, first_line=0)
    found = verifying.verify(tokens, positions, slots)[:, 0].clone()
    wanted = plain.decode([own[0] for own in tokens], positions, slots)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


def test_each_token_of_a_request_has_its_slot_and_places_without_a_draft_have_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    verifying = Decoder(tiny_model("qwen3"), num_drafts=2, **SIZES)
    noted: list[tuple[list[int], list[int], int]] = []
    run = verifying.runner.run

    def noting(token_slots: Tensor, *, width: int = 1, **values: Tensor) -> Tensor:
        noted.append((token_slots.tolist(), values["positions"].tolist(), width))
        return run(token_slots, width=width, **values)

    monkeypatch.setattr(verifying.runner, "run", noting)
    verifying.verify([[8, 1], [6], [5, 3, 2]], [3, 1, 0], [1, 0, -1])
    verifying.verify([[8], [6, 1], [5]], [3, 1, 0], [0, -1, 1])
    first = [1, 1, -1, 0, -1, -1, -1, -1, -1]
    second = [0, -1, -1, -1, -1, -1, 1, -1, -1]
    positions = [3, 4, 5, 1, 2, 3, 0, 1, 2]
    assert noted == [(first, positions, 3), (second, positions, 3)]


def test_answers_with_both_kinds_of_drafts_are_those_without_drafts() -> None:
    prompts = [(3, 5, 9, 3, 5), (7, 7), (11, 12, 11), (2, 4)]
    requests = [Request(p, n) for p, n in zip(prompts, ("one", None, "two", "one"), strict=True)]
    # some answers end early, so that requests join and move while others are decoded
    config = GenerationConfig(max_new_tokens=6, eos_token_id=list(range(4, 20)))
    expected = generate(decoder("qwen3"), requests, config)
    assert len({len(answer) for answer in expected}) > 1
    verifying = decoder("qwen3", num_drafts=2)
    draft = decoder("qwen3", max_length=16)
    draft.slots.evict("two")
    for drafter in (NgramDrafts(), ModelDrafts(draft)):
        generation = Generation(verifying, config, drafter=drafter)
        numbers = [generation.add(request) for request in requests]
        while generation.step():
            pass
        assert [generation.answers[number] for number in numbers] == expected
        # the model drafts with two of the three adapters
        assert generation.drafts.rejected > 0
    assert generation.drafts.accepted > 0


def test_drafts_that_cannot_be_verified_are_refused() -> None:
    sizes = SIZES | {"lm_head": False}
    with pytest.raises(ValueError, match=r"num_drafts must be 0 .* gated delta nets.* .got 1"):
        Decoder(tiny_model("qwen3_next"), num_drafts=1, **sizes)
    with pytest.raises(ValueError, match=r"num_drafts must be an integer of at least 0 .got -1"):
        Decoder(tiny_model("qwen3"), num_drafts=-1, **sizes)
    with pytest.raises(ValueError, match=r"sizes must be 1 to 3, which is max_tokens / 2 .got 4"):
        Decoder(tiny_model("qwen3"), num_drafts=1, graph_sizes=[4], **sizes)
    hybrid = Decoder(tiny_model("qwen3_next"), **sizes)
    with pytest.raises(ValueError, match="must have no gated delta nets"):
        ModelDrafts(hybrid)
    verifying = Decoder(copy.deepcopy(tiny_model("qwen3")), num_drafts=1, **sizes)
    for tokens, positions, message in (
        ([[1, 2, 3]], [0], r"may have 1 to 2 tokens .got \[3\]"),
        ([[]], [0], r"may have 1 to 2 tokens .got \[0\]"),
        ([], [], "a step may have 3 rows"),
        ([[1, 2]], [13], "positions must be 0 to 13 .got 14"),
    ):
        with pytest.raises(ValueError, match=message):
            verifying.verify(tokens, positions, [-1] * len(tokens))


def test_a_step_has_a_slot_for_each_request() -> None:
    with pytest.raises(
        ValueError, match=r"must be equally many .got 3 tokens, 3 positions, 2 slots"
    ):
        decoder("qwen3", num_drafts=2).verify([[8], [6], [5]], [3, 1, 2], [0, 1])


def test_tokens_are_staged_on_the_host_whatever_the_default_device_is() -> None:
    verifying, given = (
        decoder("qwen3", num_drafts=2),
        ([[8, 1], [6], [5, 3]], [0, 0, 0], [0, -1, 1]),
    )
    wanted = verifying.verify(*given).clone()
    with torch.device("meta"):
        found = verifying.verify(*given)
    assert torch.equal(found, wanted)
