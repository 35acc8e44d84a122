"""Which request is in which line, with a decoder that only notes what it is given."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("transformers", minversion="5.23")

from transformers import GenerationConfig

from lorakernels.adapters.adapter import Adapter
from lorakernels.adapters.errors import AdapterError
from lorakernels.serving.choice import most_likely
from lorakernels.serving.config import _NEUTRAL
from lorakernels.serving.generation import Generation, Request, generate

VOCABULARY = 11
SLOTS = {"first": 0, "second": 1, "third": 2}


def next_token(slot: int, tokens: list[int]) -> int:
    """Depends on the adapter, on all tokens and on their order."""
    value = slot + 2
    for token in tokens:
        value = (value * 7 + token + 1) % 10007
    return value % VOCABULARY


class NotingDecoder:
    """Keeps in each line the slot and the tokens of its request, and answers from these."""

    def __init__(self, *, max_requests: int, max_prompt_tokens: int) -> None:
        self.max_requests, self.max_prompt_tokens = max_requests, max_prompt_tokens
        self.max_length = 24
        self.config = SimpleNamespace(vocab_size=VOCABULARY)
        self.model = SimpleNamespace(generation_config=GenerationConfig(eos_token_id=3))
        self.lines: dict[int, tuple[int, list[int]]] = {}
        self.cache = self.slots = self
        self.rows = 0
        self.loaded: list[str] = []

    def slot_of(self, name: str) -> int:
        if name not in SLOTS:
            raise AdapterError(f"adapter {name} is not resident")
        return SLOTS[name]

    def activate(self, adapter: Adapter) -> int:
        self.loaded.append(adapter.name)
        return SLOTS[adapter.name]

    def evict(self, name: str) -> None:
        self.loaded.append(f"-{name}")

    def prefill(self, prompts: list[Any], slots: list[int], *, first_line: int) -> Tensor:
        assert len(prompts) * max(map(len, prompts)) <= self.max_prompt_tokens
        lines = range(first_line, first_line + len(prompts))
        assert lines.stop <= self.max_requests
        for line, prompt, slot in zip(lines, prompts, slots, strict=True):
            self.lines[line] = (slot, list(prompt))
        return self.logits(lines)

    def decode(self, tokens: list[int], positions: list[int], slots: list[int]) -> Tensor:
        self.rows += len(tokens)
        for line, token in enumerate(tokens):
            slot, seen = self.lines[line]
            assert (slots[line], positions[line]) == (slot, len(seen))
            assert positions[line] < self.max_length
            seen.append(token)
        return self.logits(range(len(tokens)))

    def move(self, source: int, target: int) -> None:
        self.lines[target] = self.lines.pop(source)

    def logits(self, lines: range) -> Tensor:
        chosen = torch.tensor([next_token(*self.lines[line]) for line in lines])
        return torch.nn.functional.one_hot(chosen, VOCABULARY).float()


def alone(request: Request, limit: int, ends: set[int]) -> list[int]:
    slot = -1 if request.adapter is None else SLOTS[request.adapter]
    answer: list[int] = []
    while len(answer) < limit and not ends.intersection(answer[-1:]):
        answer.append(next_token(slot, [*request.prompt, *answer]))
    return answer


PROMPT = st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=6).map(tuple)
REQUEST = st.builds(Request, PROMPT, st.sampled_from([None, *SLOTS]))


@settings(max_examples=200)
@given(
    st.lists(REQUEST, max_size=9),
    st.integers(1, 4),
    st.integers(6, 15),
    st.integers(1, 7),
    st.sets(st.integers(0, VOCABULARY - 1), min_size=1, max_size=4),
)
def test_each_request_gets_its_own_answer_whoever_joins_and_leaves(
    requests: list[Request], lines: int, prompt_tokens: int, limit: int, ends: set[int]
) -> None:
    decoder: Any = NotingDecoder(max_requests=lines, max_prompt_tokens=prompt_tokens)
    config = GenerationConfig(max_new_tokens=limit, eos_token_id=sorted(ends))
    expected = [alone(request, limit, ends) for request in requests]
    assert generate(decoder, requests, config) == expected
    # a request that has ended takes no row: the prompt pass gives the first token of each
    assert decoder.rows == sum(len(answer) - 1 for answer in expected)


# sums of large logits leave a dtype of 16 bits, differences of small ones are rounded in it
@pytest.mark.parametrize(("spread", "center"), [(4.0, 70.0), (1.0, 0.0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_log_probabilities_are_those_of_the_logits_and_not_of_what_a_dtype_makes_of_their_sum(
    dtype: torch.dtype, spread: float, center: float
) -> None:
    generator = torch.Generator().manual_seed(3)
    logits = (torch.randn(3, 2, 300, generator=generator) * spread + center).to(dtype)
    wanted = logits.double().log_softmax(-1).max(-1)
    for said in (most_likely(logits, logprobs=wants) for wants in (True, False)):
        assert [one.tokens for one in said] == wanted.indices.tolist()
    found = torch.tensor([one.logprobs for one in most_likely(logits, logprobs=True)])
    torch.testing.assert_close(found.double(), wanted.values, rtol=0, atol=2e-5)
    assert [one.logprobs for one in most_likely(logits, logprobs=False)] == [[], [], []]


def test_log_probabilities_are_kept_of_each_token_where_they_are_wanted() -> None:
    config = GenerationConfig(max_new_tokens=4, eos_token_id=[])
    # all logits but one are 0
    wanted = 1 - math.log(math.e + VOCABULARY - 1)
    for wants, expected in ((True, {0: [pytest.approx(wanted)] * 4}), (False, {})):
        decoder: Any = NotingDecoder(max_requests=1, max_prompt_tokens=8)
        generation = Generation(decoder, config, logprobs=wants)
        generation.add(Request((1, 2)))
        while generation.step():
            pass
        assert generation.logprobs == expected


def test_a_request_may_be_added_while_others_are_decoded() -> None:
    decoder: Any = NotingDecoder(max_requests=2, max_prompt_tokens=8)
    generation = Generation(decoder, GenerationConfig(max_new_tokens=4, eos_token_id=[]))
    requests = [Request((1, 2)), Request((5,), "second"), Request((4, 4, 4), "first")]
    numbers = []
    for request in requests:
        numbers.append(generation.add(request))
        generation.step()
    while generation.step():
        pass
    assert [generation.answers[n] for n in numbers] == [alone(r, 4, set()) for r in requests]


def test_a_prompt_that_its_caller_goes_on_writing_to_stays_as_it_was_added() -> None:
    decoder: Any = NotingDecoder(max_requests=1, max_prompt_tokens=8)
    generation = Generation(decoder, GenerationConfig(max_new_tokens=4, eos_token_id=[]))
    conversation: Any = [1, 2]
    numbers = [generation.add(Request(conversation)) for _ in range(2)]
    while generation.step():
        conversation.append(5)
    expected = alone(Request((1, 2)), 4, set())
    assert [generation.answers[number] for number in numbers] == [expected] * 2


@pytest.mark.parametrize("end", [0, [0], []])
def test_an_end_of_the_config_is_taken_also_if_it_is_zero_or_none_at_all(
    end: int | list[int],
) -> None:
    decoder: Any = NotingDecoder(max_requests=2, max_prompt_tokens=8)
    requests = [Request((token,)) for token in range(VOCABULARY)]
    ends = {0} if end != [] else set[int]()
    expected = [alone(request, 9, ends) for request in requests]
    assert expected != [alone(request, 9, {3}) for request in requests]
    config = GenerationConfig(max_new_tokens=9, eos_token_id=end)
    assert generate(decoder, requests, config) == expected


@pytest.mark.parametrize("end", [torch.tensor(0), torch.tensor([0, 5]), [0, 5], (0, 5)])
def test_ends_that_are_tensors_end_an_answer_like_numbers(end: Any) -> None:
    decoder: Any = NotingDecoder(max_requests=2, max_prompt_tokens=8)
    requests = [Request((token,)) for token in range(VOCABULARY)]
    ends = {0} if isinstance(end, Tensor) and end.dim() == 0 else {0, 5}
    expected = [alone(request, 9, ends) for request in requests]
    assert {answer[-1] for answer in expected} >= ends
    config = GenerationConfig(max_new_tokens=9, eos_token_id=end)
    assert generate(decoder, requests, config) == expected


@pytest.mark.parametrize("end", [5.0, "5", [[5]], ["5"], {5}, torch.tensor([5.0])])
def test_an_end_that_is_no_integer_is_refused(end: Any) -> None:
    decoder: Any = NotingDecoder(max_requests=1, max_prompt_tokens=8)
    config = GenerationConfig(max_new_tokens=2)
    config.eos_token_id = end
    with pytest.raises(ValueError, match="eos_token_id must be an integer or a list of integers"):
        Generation(decoder, config)


def test_a_config_without_an_end_takes_that_of_the_model() -> None:
    decoder: Any = NotingDecoder(max_requests=2, max_prompt_tokens=8)
    # the answers of these contain a 3, which ends them
    requests = [r for r in (Request((t,)) for t in range(VOCABULARY)) if 3 in alone(r, 9, set())]
    answers = generate(decoder, requests, GenerationConfig(max_new_tokens=9))
    assert answers == [alone(request, 9, {3}) for request in requests]
    assert {answer[-1] for answer in answers} == {3}


def test_an_adapter_cannot_be_replaced_or_evicted_while_a_request_uses_it() -> None:
    decoder: Any = NotingDecoder(max_requests=1, max_prompt_tokens=8)
    generation = Generation(decoder, GenerationConfig(max_new_tokens=2, eos_token_id=[]))
    generation.add(Request((1,), "first"))
    generation.add(Request((1,), "second"))
    assert generation.step()
    # request 0 has ended, request 1 waits
    assert list(generation.answers) == [0]
    for refused in (
        lambda: generation.activate(Adapter("second", {})),
        lambda: generation.evict("second"),
    ):
        with pytest.raises(AdapterError, match=r"adapter second is in use by request 1"):
            refused()
    generation.evict("first")
    while generation.step():
        pass
    generation.activate(Adapter("second", {}))
    assert decoder.loaded == ["-first", "second"]


def test_an_adapter_stays_while_a_request_of_another_generation_uses_it() -> None:
    decoder: Any = NotingDecoder(max_requests=1, max_prompt_tokens=8)
    config = GenerationConfig(max_new_tokens=2, eos_token_id=[])
    first, second = Generation(decoder, config), Generation(decoder, config)
    first.add(Request((1,), "first"))
    for refused in (
        lambda: second.activate(Adapter("first", {})),
        lambda: second.evict("first"),
    ):
        with pytest.raises(AdapterError, match="first is in use by request 0 of another Gener"):
            refused()
    second.evict("second")
    while first.step():
        pass
    second.evict("first")
    first.add(Request((1,), "first"))
    del first
    second.evict("first")
    assert decoder.loaded == ["-second", "-first", "-first"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "max_new_tokens must be an integer of at least 1"),
        ({"max_new_tokens": 0}, "max_new_tokens must be an integer of at least 1"),
        ({"max_new_tokens": 2.5}, "max_new_tokens must be an integer of at least 1"),
        ({"max_new_tokens": 2, "do_sample": True}, "must ask for greedy search .got sample"),
        ({"max_new_tokens": 2, "num_beams": 3}, "must ask for greedy search .got beam_search"),
        ({"max_new_tokens": 2, "repetition_penalty": 1.1}, "repetition_penalty"),
        ({"max_new_tokens": 2, "suppress_tokens": [4]}, "suppress_tokens"),
        ({"max_new_tokens": 2, "token_healing": True}, "token_healing"),
        ({"max_new_tokens": 2, "encoder_no_repeat_ngram_size": 1}, "encoder_no_repeat_ngram_size"),
        ({"max_new_tokens": 2, "encoder_repetition_penalty": 3.0}, "encoder_repetition_penalty"),
        ({"max_new_tokens": 2, "remove_invalid_values": True}, "remove_invalid_values"),
        ({"max_new_tokens": 2, "max_time": 0.5}, "max_time"),
    ],
)
def test_a_config_that_asks_for_more_than_greedy_search_is_refused(
    options: dict[str, Any], message: str
) -> None:
    decoder: Any = NotingDecoder(max_requests=1, max_prompt_tokens=8)
    # transformers itself refuses some values where they are set
    config = GenerationConfig()
    for name, value in options.items():
        setattr(config, name, value)
    with pytest.raises(ValueError, match=message):
        Generation(decoder, config)


def test_a_config_that_says_what_transformers_does_by_itself_is_taken() -> None:
    decoder: Any = NotingDecoder(max_requests=1, max_prompt_tokens=8)
    config = GenerationConfig(max_new_tokens=2)
    # as files of models spell them out
    for name in ("repetition_penalty", "encoder_repetition_penalty", "guidance_scale"):
        setattr(config, name, 1.0)
    for name in ("no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "min_length"):
        setattr(config, name, 0)
    config.min_new_tokens, config.num_return_sequences = 0, 1
    config.remove_invalid_values = config.token_healing = False
    Generation(decoder, config)


@pytest.mark.parametrize(("name", "neutral"), _NEUTRAL.items())
def test_a_value_that_is_off_elsewhere_is_refused_where_it_asks_for_something(
    name: str, neutral: object
) -> None:
    decoder: Any = NotingDecoder(max_requests=1, max_prompt_tokens=8)
    config = GenerationConfig(max_new_tokens=2)
    # such as token 0 as the last one that is forced, and a penalty that divides by 0
    for value in (0, False, ()):
        if value != neutral:
            setattr(config, name, value)
            with pytest.raises(ValueError, match=f"{name} of the generation config"):
                Generation(decoder, config)


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (Request(()), "prompt must have a token .got none"),
        (Request((1, VOCABULARY)), "prompt must be integers from 0 to 10 .got 11"),
        (Request((-1, 1)), "prompt must be integers from 0 to 10 .got -1"),
        (Request((1.5, 1)), "prompt must be integers from 0 to 10 .got 1.5"),
        (Request(("a",)), "prompt must be integers from 0 to 10 .got 'a'"),
        (Request(torch.tensor([1, 2])), r"prompt must be integers from 0 to 10 .got tensor.1"),
        (Request(torch.tensor([])), "prompt must have a token .got none"),
        (Request((1,) * 9), "prompt may have 8 tokens .got 9"),
        (Request((1,) * 6), "may have 24 tokens in the cache .got 25"),
        (Request((1,), "fourth"), "fourth is not resident"),
    ],
)
def test_a_request_that_cannot_be_served_is_refused_when_it_is_added(
    request_: Request, message: str
) -> None:
    decoder: Any = NotingDecoder(max_requests=1, max_prompt_tokens=8)
    generation = Generation(decoder, GenerationConfig(max_new_tokens=20))
    with pytest.raises((ValueError, AdapterError), match=message):
        generation.add(request_)
    assert not generation.step()
