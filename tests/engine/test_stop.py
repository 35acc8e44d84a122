"""Tokens that end answers: which ones a batch has, and how long its answers are then."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import pytest

from loragate.engine.batch import draw_batch
from loragate.engine.language import KINDS, draw_speakers
from loragate.engine.requests import Request
from loragate.engine.stop import with_stop
from loragate.matrix.case import Case, Dtype, Site
from loragate.matrix.engine_case import Model, Speculation


def ended(seed: int, active: int, **axes: object) -> list[tuple[Request, list[int]]]:
    """The requests of a batch with so many adapters, and their answers if nothing ended them."""
    fixed = {"site": Site.ENGINE, "rank": 8, "slots": 2, "dtype": Dtype.FP32}
    case = Case(**{**fixed, **axes})  # type: ignore[arg-type]
    language, random = KINDS[case.model], Random(seed)
    speakers = draw_speakers(language, max(2, active), random)
    names = [speaker.name for speaker in speakers[:active]]
    batch = draw_batch(case, language, speakers, names, random)
    answers = [
        language.words_after(asked.prompt, asked.speaker, asked.request.new_tokens)
        for asked in batch
    ]
    found = [asked.request for asked in with_stop(batch, answers)]
    # an engine may have them for a whole batch only
    assert len({request.stop for request in found}) == 1
    return list(zip(found, answers, strict=True))


def lengths_of(found: Sequence[tuple[Request, list[int]]]) -> list[int]:
    return [request.wanted(answer) for request, answer in found]


@pytest.mark.parametrize("active", [1, 2, 4])
@pytest.mark.parametrize("model", [*Model])
@pytest.mark.parametrize("speculation", [Speculation.NONE, Speculation.NGRAM])
def test_answers_of_a_batch_end_at_once_or_later_or_at_their_limit(
    active: int, model: Model, speculation: Speculation
) -> None:
    for seed in range(10):
        found = ended(seed, active, model=model, speculation=speculation)
        lengths, limits = lengths_of(found), [request.new_tokens for request, _ in found]
        assert lengths.count(1) >= 1
        assert any(1 < length < limit for length, limit in zip(lengths, limits, strict=True))
        assert any(length == limit for length, limit in zip(lengths, limits, strict=True))
        # it is asked alone as well, and has a step behind its prompt then
        assert lengths[-1] > 1


@pytest.mark.parametrize("active", [1, 2, 4])
def test_the_drafts_of_an_ngram_lead_beyond_the_end_of_an_answer(active: int) -> None:
    for seed in range(10):
        passed = [
            # the last word of the prompt, the answer and what would follow, in the prompt itself
            has((request.prompt[-1], *answer[: length + 1]), request.prompt)
            for request, answer in ended(seed, active, speculation=Speculation.NGRAM)
            for length in [request.wanted(answer)]
            if 1 < length < request.new_tokens
        ]
        assert any(passed)


def has(part: tuple[int, ...], prompt: tuple[int, ...]) -> bool:
    return any(prompt[place:][: len(part)] == part for place in range(len(prompt)))


def test_a_batch_of_two_requests_ends_at_different_times_in_most_cases() -> None:
    found = [lengths_of(ended(seed, 0)) for seed in range(20)]
    assert sum(len(set(lengths)) > 1 for lengths in found) >= 18


def test_an_answer_ends_with_the_first_token_that_ends_it_and_at_its_limit_in_any_case() -> None:
    request = Request((1,), None, new_tokens=3, stop=(7, 8))
    for answer, wanted in (
        ((7, 1, 1), 1),
        ((1, 8, 7), 2),
        ((1, 1, 1, 7), 3),
        ((1,), 3),
        ((), 3),
    ):
        assert request.wanted(answer) == wanted, answer
    assert Request((7,), None, new_tokens=2).wanted((7, 7)) == 2
