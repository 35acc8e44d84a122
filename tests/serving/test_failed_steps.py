"""Generations whose steps fail, and several of them beside each other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", minversion="5.23")

from transformers import GenerationConfig

from lorakernels.serving.decoder import Decoder
from lorakernels.serving.generation import Generation, Request, generate
from lorakernels.serving.speculation import ModelDrafts, NgramDrafts
from lorakernels.serving.tiny import tiny_model

SIZES = {"num_slots": 1, "rank": 2, "max_requests": 2, "max_length": 16, "max_prompt_tokens": 32}
PROMPTS = ((5, 17, 42, 8), (9, 7, 6))
# no token of the tiny models ends a text
CONFIG = GenerationConfig(max_new_tokens=5, eos_token_id=[])
# the second one is no Exception
ERRORS = (torch.OutOfMemoryError, KeyboardInterrupt)


class FailsOnce:
    """A call that raises once, and works from then on. `late`: when its work is done."""

    def __init__(
        self,
        call: Callable[..., Any],
        *,
        late: bool = False,
        error: type[BaseException] = torch.OutOfMemoryError,
    ) -> None:
        self.call, self.late, self.error, self.has_failed = call, late, error, False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.has_failed:
            return self.call(*args, **kwargs)
        self.has_failed = True
        if self.late:
            self.call(*args, **kwargs)
        raise self.error("out of memory, or interrupted by its user")


def small_decoder(kind: str, **changes: Any) -> Decoder:
    return Decoder(tiny_model(kind), **(SIZES | changes))


def generation_of(decoder: Decoder, drafter: NgramDrafts | None = None) -> Generation:
    """All prompts, none of which has joined."""
    generation = Generation(decoder, CONFIG, drafter=drafter)
    for prompt in PROMPTS:
        generation.add(Request(prompt))
    return generation


def answers_of(generation: Generation) -> list[list[int]]:
    while generation.step():
        pass
    return [generation.answers[number] for number in sorted(generation.answers)]


def wanted(kind: str) -> list[list[int]]:
    return generate(small_decoder(kind), [Request(p) for p in PROMPTS], CONFIG)


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("kind", ["qwen3", "qwen3_next"])
def test_requests_whose_prompt_pass_fails_go_on_waiting(
    kind: str, late: bool, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = small_decoder(kind)
    generation = generation_of(decoder)
    monkeypatch.setattr(decoder, "prefill", FailsOnce(decoder.prefill, late=late, error=error))
    with pytest.raises(error):
        generation.step()
    assert not generation.answers
    assert answers_of(generation) == wanted(kind)


@pytest.mark.parametrize("error", ERRORS)
def test_requests_that_a_drafter_could_not_take_go_on_waiting(
    error: type[BaseException],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drafter = NgramDrafts()
    generation = generation_of(small_decoder("qwen3", num_drafts=2), drafter)
    monkeypatch.setattr(drafter, "join", FailsOnce(drafter.join, error=error))
    with pytest.raises(error):
        generation.step()
    assert answers_of(generation) == wanted("qwen3")


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("late", [False, True])
def test_a_decode_step_that_failed_may_be_repeated_where_a_line_can_go_back(
    late: bool, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = small_decoder("qwen3")
    generation = generation_of(decoder)
    monkeypatch.setattr(decoder, "decode", FailsOnce(decoder.decode, late=late, error=error))
    with pytest.raises(error):
        generation.step()
    assert answers_of(generation) == wanted("qwen3")


@pytest.mark.parametrize("error", ERRORS)
def test_a_decode_step_that_failed_ends_a_generation_with_delta_nets(
    error: type[BaseException],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    decoder = small_decoder("qwen3_next")
    generation = generation_of(decoder)
    # the states of the delta nets are those behind the token then
    monkeypatch.setattr(decoder, "decode", FailsOnce(decoder.decode, late=True, error=error))
    with pytest.raises(error):
        generation.step()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="add its requests to another Generation"):
            generation.step()
    # which may use the decoder at once
    assert generate(decoder, [Request(p) for p in PROMPTS], CONFIG) == wanted("qwen3_next")


def test_a_generation_does_not_take_the_lines_of_another_one() -> None:
    decoder = small_decoder("qwen3")
    first, second = Generation(decoder, CONFIG), Generation(decoder, CONFIG)
    first.add(Request(PROMPTS[0]))
    second.add(Request(PROMPTS[1]))
    first.step()
    with pytest.raises(RuntimeError, match="has 1 requests of another Generation"):
        second.step()
    assert answers_of(first) == wanted("qwen3")[:1]
    # it has lost nothing
    assert answers_of(second) == wanted("qwen3")[1:]


def test_a_generation_that_was_dropped_frees_its_lines() -> None:
    decoder = small_decoder("qwen3")
    dropped = Generation(decoder, CONFIG)
    dropped.add(Request(PROMPTS[0]))
    dropped.step()
    del dropped
    assert generate(decoder, [Request(p) for p in PROMPTS], CONFIG) == wanted("qwen3")


def drafting_generation(draft: Decoder) -> Generation:
    """A request of another decoder, for which `draft` drafts."""
    decoder = small_decoder("qwen3", num_drafts=2, max_length=12)
    generation = Generation(decoder, CONFIG, drafter=ModelDrafts(draft))
    generation.add(Request(PROMPTS[1]))
    return generation


def test_a_model_does_not_draft_in_the_lines_of_requests_that_it_answers() -> None:
    draft = small_decoder("qwen3")
    answered, drafted = generation_of(draft), drafting_generation(draft)
    answered.step()
    with pytest.raises(RuntimeError, match="has 2 requests of another Generation"):
        drafted.step()
    assert answers_of(answered) == wanted("qwen3")
    # it has lost nothing
    assert answers_of(drafted) == wanted("qwen3")[1:]


def test_a_model_does_not_answer_in_the_lines_of_requests_that_it_drafts_for() -> None:
    draft = small_decoder("qwen3")
    answered, drafted = generation_of(draft), drafting_generation(draft)
    drafted.step()
    with pytest.raises(RuntimeError, match="has 1 requests of another Generation"):
        answered.step()
    assert answers_of(drafted) == wanted("qwen3")[1:]
    assert answers_of(answered) == wanted("qwen3")
