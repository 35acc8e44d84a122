"""Drafts and their acceptance, with a decoder that keeps the text of each line."""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("transformers", minversion="5.23")

from transformers import GenerationConfig

from lorakernels.adapters.errors import AdapterError
from lorakernels.serving.generation import Generation, Request, generate
from lorakernels.serving.speculation import (
    DraftCounts,
    ModelDrafts,
    NgramDrafts,
    Text,
    accepted_drafts,
)

VOCABULARY = 11
SLOTS = {"first": 0, "second": 1, "third": 2}


def mixed(slot: int, tokens: Sequence[int]) -> int:
    """Depends on the adapter, on all tokens and on their order."""
    value = slot + 2
    for token in tokens:
        value = (value * 7 + token + 1) % 10007
    return value


def next_token(slot: int, tokens: Sequence[int]) -> int:
    return mixed(slot, tokens) % VOCABULARY


def lead(slot: int, tokens: Sequence[int]) -> float:
    """How far the logit of the next token is above all others."""
    return 1 + mixed(slot, tokens) % 97 / 97


class TextDecoder:
    """A line holds a slot and the tokens whose keys and values a cache would hold. A step begins
    at a position, writes there, and sees nothing behind it."""

    takes_back = True

    def __init__(
        self,
        *,
        max_requests: int,
        max_prompt_tokens: int = 8,
        num_drafts: int = 0,
        max_length: int = 24,
        slots: dict[str, int] | None = None,
    ) -> None:
        self.max_requests, self.max_prompt_tokens = max_requests, max_prompt_tokens
        self.num_drafts, self.max_length = num_drafts, max_length
        self.config = SimpleNamespace(vocab_size=VOCABULARY)
        self.model = SimpleNamespace(generation_config=GenerationConfig())
        self.lines: dict[int, tuple[int, list[int]]] = {}
        self.cache = self.slots = self
        self.names = SLOTS if slots is None else slots
        self.steps = self.verified = 0

    def slot_of(self, name: str) -> int:
        if name not in self.names:
            raise AdapterError(f"adapter {name} is not resident")
        return self.names[name]

    def prefill(self, prompts: Any, slots: Sequence[int], *, first_line: int) -> Tensor:
        for line, (prompt, slot) in enumerate(zip(prompts, slots, strict=True), first_line):
            self.lines[line] = (slot, list(prompt))
        return self.logits([[len(prompt)] for prompt in prompts], first_line)[:, 0]

    def decode(
        self, tokens: Sequence[int], positions: Sequence[int], slots: Sequence[int]
    ) -> Tensor:
        return self.write([[token] for token in tokens], positions, slots)[:, 0]

    def verify(
        self, tokens: Sequence[Sequence[int]], positions: Sequence[int], slots: Sequence[int]
    ) -> Tensor:
        assert max(map(len, tokens)) <= 1 + self.num_drafts
        self.verified += sum(map(len, tokens)) - len(tokens)
        return self.write(tokens, positions, slots)

    def write(
        self, tokens: Sequence[Sequence[int]], positions: Sequence[int], slots: Sequence[int]
    ) -> Tensor:
        self.steps += 1
        for line, (own, position) in enumerate(zip(tokens, positions, strict=True)):
            slot, seen = self.lines[line]
            assert slots[line] == slot
            assert 0 < position <= len(seen)
            assert position + len(own) <= self.max_length
            seen[position:] = own
        ends = [[p + n + 1 for n in range(len(t))] for p, t in zip(positions, tokens, strict=True)]
        return self.logits(ends)

    def move(self, source: int, target: int) -> None:
        self.lines[target] = self.lines.pop(source)

    def logits(self, ends: list[list[int]], first: int = 0) -> Tensor:
        """Behind the first so many tokens of each line; padding prefers the last token."""
        width = 1 + self.num_drafts
        logits = torch.zeros(len(ends), width, VOCABULARY)
        logits[:, :, -1] = 9
        for line, counts in enumerate(ends, first):
            slot, seen = self.lines[line]
            for column, count in enumerate(counts):
                own = logits[line - first, column].zero_()
                own[next_token(slot, seen[:count])] = lead(slot, seen[:count])
        return logits


class PatternDrafts:
    """Drafts what the decoder would say, or something else, as `pattern` says in turn."""

    decoders = ()

    def __init__(self, pattern: Sequence[bool]) -> None:
        self.pattern, self.asked = pattern, 0

    def check(self, decoder: Any) -> None:
        pass

    def join(self, first_line: int, texts: Sequence[Text]) -> None:
        pass

    def move(self, source: int, target: int) -> None:
        pass

    def propose(self, texts: Sequence[Text], counts: Sequence[int]) -> list[list[int]]:
        return [self.drafts(text, count) for text, count in zip(texts, counts, strict=True)]

    def drafts(self, text: Text, count: int) -> list[int]:
        slot, seen = -1 if text.adapter is None else SLOTS[text.adapter], list(text.tokens)
        for _ in range(count):
            is_right = self.pattern[self.asked % len(self.pattern)]
            self.asked += 1
            seen.append((next_token(slot, seen) + (not is_right)) % VOCABULARY)
        return seen[len(text.tokens) :]


def alone(request: Request, limit: int, ends: set[int]) -> list[int]:
    slot = -1 if request.adapter is None else SLOTS[request.adapter]
    answer: list[int] = []
    while len(answer) < limit and not ends.intersection(answer[-1:]):
        answer.append(next_token(slot, [*request.prompt, *answer]))
    return answer


def logprobs_alone(request: Request, answer: Sequence[int]) -> list[float]:
    """All logits but one are 0."""
    slot = -1 if request.adapter is None else SLOTS[request.adapter]
    texts = [[*request.prompt, *answer[:place]] for place in range(len(answer))]
    leads = [lead(slot, text) for text in texts]
    return [own - math.log(math.exp(own) + VOCABULARY - 1) for own in leads]


PROMPT = st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=6).map(tuple)
REQUESTS = st.lists(
    st.builds(Request, PROMPT, st.sampled_from([None, *SLOTS])), min_size=1, max_size=7
)
ENDS = st.sets(st.integers(0, VOCABULARY - 1), max_size=3)


@settings(max_examples=200)
@given(
    REQUESTS, st.integers(1, 4), st.integers(1, 5), st.integers(1, 9), ENDS, st.lists(st.booleans())
)
def test_answers_do_not_depend_on_which_drafts_are_right(
    requests: list[Request],
    lines: int,
    num_drafts: int,
    limit: int,
    ends: set[int],
    pattern: list[bool],
) -> None:
    decoder: Any = TextDecoder(max_requests=lines, num_drafts=num_drafts)
    config = GenerationConfig(max_new_tokens=limit, eos_token_id=sorted(ends))
    drafter = PatternDrafts([*pattern, True])
    generation = Generation(decoder, config, drafter=drafter, logprobs=True)
    # requests are added while others are decoded
    numbers = []
    for request in requests:
        numbers.append(generation.add(request))
        generation.step()
    while generation.step():
        pass
    answers = [generation.answers[number] for number in numbers]
    assert answers == [alone(request, limit, ends) for request in requests]
    for number, request in zip(numbers, requests, strict=True):
        wanted = logprobs_alone(request, generation.answers[number])
        assert generation.logprobs[number] == pytest.approx(wanted, abs=1e-6)
    counts = generation.drafts
    assert counts.accepted + counts.rejected == decoder.verified
    # what is neither from a prompt pass nor the token behind the drafts of a step was a draft
    assert counts.accepted <= sum(len(answer) - 1 for answer in answers)


def test_drafts_that_are_right_take_a_step_for_all_of_them() -> None:
    for pattern, steps, counts in (
        # the first token is that of the prompt pass, and a step gives 4
        ([True], 2, DraftCounts(accepted=6)),
        ([False], 8, DraftCounts(rejected=18)),
        ([True, False, True], 4, DraftCounts(accepted=4, rejected=6)),
    ):
        decoder: Any = TextDecoder(max_requests=1, num_drafts=3)
        config = GenerationConfig(max_new_tokens=9, eos_token_id=[])
        generation = Generation(decoder, config, drafter=PatternDrafts(pattern))
        generation.add(Request((1, 2), "second"))
        while generation.step():
            pass
        assert (decoder.steps, generation.drafts) == (steps, counts), pattern


def test_drafts_beyond_those_that_were_asked_for_are_not_taken() -> None:
    class Talkative(PatternDrafts):
        def drafts(self, text: Text, count: int) -> list[int]:
            return super().drafts(text, count + 2)

    decoder: Any = TextDecoder(max_requests=1, num_drafts=3)
    config = GenerationConfig(max_new_tokens=6, eos_token_id=[])
    generation = Generation(decoder, config, drafter=Talkative([True]))
    request = Request((1, 2), "second")
    number = generation.add(request)
    for _ in range(6):
        generation.step()
    assert generation.answers[number] == alone(request, 6, set())


def test_a_draft_behind_the_end_of_an_answer_was_not_accepted() -> None:
    request = Request((1, 2), "second")
    whole = alone(request, 4, set())
    end = whole[2]
    assert end not in whole[:2]
    decoder: Any = TextDecoder(max_requests=1, num_drafts=3)
    config = GenerationConfig(max_new_tokens=9, eos_token_id=end)
    generation = Generation(decoder, config, drafter=PatternDrafts([True]))
    number = generation.add(request)
    assert not generation.step()
    assert generation.answers[number] == whole[:3]
    assert generation.drafts == DraftCounts(accepted=2, rejected=1)


@settings(max_examples=100)
@given(REQUESTS, st.integers(1, 3), st.integers(1, 4), st.integers(1, 7), ENDS)
def test_a_model_that_speaks_alike_drafts_nothing_that_is_rejected(
    requests: list[Request], lines: int, num_drafts: int, limit: int, ends: set[int]
) -> None:
    decoder: Any = TextDecoder(max_requests=lines, num_drafts=num_drafts)
    # without the third adapter
    resident = {name: slot for name, slot in SLOTS.items() if name != "third"}
    draft: Any = TextDecoder(max_requests=lines, max_length=24 + num_drafts, slots=resident)
    config = GenerationConfig(max_new_tokens=limit, eos_token_id=sorted(ends))
    generation = Generation(decoder, config, drafter=ModelDrafts(draft))
    numbers = [generation.add(request) for request in requests]
    while generation.step():
        pass
    answers = [generation.answers[number] for number in numbers]
    assert answers == [alone(request, limit, ends) for request in requests]
    # drafts behind the end of an answer are not accepted
    if not ends and not any(request.adapter == "third" for request in requests):
        assert generation.drafts.rejected == 0


def test_a_model_drafts_with_the_adapter_of_the_request_where_it_has_it() -> None:
    draft: Any = TextDecoder(max_requests=3, slots={"first": 0})
    drafter, texts = ModelDrafts(draft), [Text((1, 2), name) for name in ("first", "second", None)]
    drafter.join(0, [Text((1,), text.adapter) for text in texts])
    drafts = drafter.propose(texts, [2, 1, 0])
    for own, slot, count in zip(drafts, (0, -1, -1), (2, 1, 0), strict=True):
        first = next_token(slot, (1, 2))
        assert own == [first, next_token(slot, (1, 2, first))][:count]
    # the last draft is in the cache, too: all of them may be accepted
    assert [len(seen) for _, seen in draft.lines.values()] == [4, 4, 4]


def test_no_model_runs_where_no_draft_is_asked_for() -> None:
    draft: Any = TextDecoder(max_requests=2)
    drafter, texts = ModelDrafts(draft), [Text((1, 2), None), Text((3, 4), None)]
    drafter.join(0, [Text(text.tokens[:1], None) for text in texts])
    before = [list(seen) for _, seen in draft.lines.values()]
    assert drafter.propose(texts, [0, 0]) == [[], []]
    assert [list(seen) for _, seen in draft.lines.values()] == before


@pytest.mark.parametrize(
    ("tokens", "count", "drafts"),
    [
        ((1, 2, 3, 4, 9, 2, 3), 2, [4, 9]),
        # the longest match counts, not the latest one
        ((1, 2, 3, 4, 3, 5, 2, 3), 1, [4]),
        # of up to three tokens
        ((1, 2, 3, 4, 2, 3, 5, 1, 2, 3), 1, [4]),
        ((9, 1, 2, 3, 4, 8, 1, 2, 3, 5, 9, 1, 2, 3), 1, [5]),
        # and of those of one length the latest
        ((3, 4, 3, 5, 9, 3), 1, [5]),
        # no more than the text has
        ((7, 8, 7), 4, [8, 7]),
        ((1, 2, 3), 2, []),
        ((1,), 2, []),
        ((7, 7), 0, []),
    ],
)
def test_an_ngram_is_followed_by_what_followed_it_before(
    tokens: tuple[int, ...], count: int, drafts: list[int]
) -> None:
    assert NgramDrafts().propose([Text(tokens, None)], [count]) == [drafts]


def test_each_text_needs_a_number_of_drafts() -> None:
    texts = [Text((7, 8, 7), None), Text((7, 8, 7), None)]
    with pytest.raises(ValueError, match="shorter"):
        NgramDrafts().propose(texts, [1])


@given(st.lists(st.integers(0, 2), max_size=5), st.lists(st.integers(0, 2), min_size=6, max_size=6))
def test_drafts_are_accepted_up_to_the_first_that_was_not_chosen(
    drafts: list[int], chosen: list[int]
) -> None:
    count = accepted_drafts(drafts, chosen)
    assert drafts[:count] == chosen[:count]
    assert count == len(drafts) or drafts[count] != chosen[count]


def test_drafts_that_fit_no_decoder_are_refused() -> None:
    config = GenerationConfig(max_new_tokens=2)
    plain: Any = TextDecoder(max_requests=1)
    with pytest.raises(ValueError, match="num_drafts of the decoder must be at least 1"):
        Generation(plain, config, drafter=NgramDrafts())
    with pytest.raises(ValueError, match="longest must be at least 1"):
        NgramDrafts(0)
    decoder: Any = TextDecoder(max_requests=2, num_drafts=2)
    for sizes, message in (
        ({"max_requests": 1, "max_length": 26}, r"max_requests of the drafts .* least 2 .got 1"),
        ({"max_requests": 2, "max_length": 25}, r"max_length of the drafts .* least 26 .got 25"),
        (
            {"max_requests": 2, "max_length": 26, "max_prompt_tokens": 7},
            r"max_prompt_tokens of the drafts must be at least 8 .got 7",
        ),
    ):
        draft: Any = TextDecoder(**sizes)
        with pytest.raises(ValueError, match=message):
            Generation(decoder, config, drafter=ModelDrafts(draft))
    draft = TextDecoder(max_requests=2, max_length=26)
    for size in (10, 12):
        draft.config.vocab_size = size
        with pytest.raises(ValueError, match=rf"vocabulary of 11 \(got {size}\)"):
            generate(decoder, [], config, drafter=ModelDrafts(draft))
    draft.takes_back = False
    with pytest.raises(ValueError, match="must have no gated delta nets"):
        ModelDrafts(draft)
