"""Tokens that end answers: which ones a batch has, and how long its answers are then."""

from __future__ import annotations

from random import Random

import pytest

from loragate.engine.batch import draw_batch
from loragate.engine.language import KINDS, draw_speakers
from loragate.engine.requests import Request
from loragate.engine.stop import with_stop
from loragate.matrix.case import Case, Dtype, Site
from loragate.matrix.engine_case import Model, Speculation


def lengths_of(seed: int, active: int, **axes: object) -> tuple[list[int], list[int]]:
    """Of a batch with so many adapters: how long its answers are, and would be without an end."""
    fixed = {"site": Site.ENGINE, "rank": 8, "slots": 2, "dtype": Dtype.FP32}
    case = Case(**{**fixed, **axes})  # type: ignore[arg-type]
    language, random = KINDS[case.model], Random(seed)
    speakers = draw_speakers(language, max(2, active), random)
    names = [speaker.name for speaker in speakers[:active]]
    batch = draw_batch(case, language, speakers, names, random)
    limits = [asked.request.new_tokens for asked in batch]
    answers = [
        language.words_after(asked.prompt, asked.speaker, limit)
        for asked, limit in zip(batch, limits, strict=True)
    ]
    ended = with_stop(batch, answers)
    # an engine may have them for a whole batch only
    assert len({asked.request.stop for asked in ended}) == 1
    found = zip(ended, answers, strict=True)
    return [asked.request.wanted(answer) for asked, answer in found], limits


@pytest.mark.parametrize("active", [1, 2, 4])
@pytest.mark.parametrize("model", [*Model])
@pytest.mark.parametrize("speculation", [Speculation.NONE, Speculation.NGRAM])
def test_answers_of_a_batch_end_at_once_or_later_or_at_their_limit(
    active: int, model: Model, speculation: Speculation
) -> None:
    for seed in range(10):
        lengths, limits = lengths_of(seed, active, model=model, speculation=speculation)
        assert lengths.count(1) >= 1
        assert any(1 < length < limit for length, limit in zip(lengths, limits, strict=True))
        assert any(length == limit for length, limit in zip(lengths, limits, strict=True))
        # it is asked alone as well, and has a step behind its prompt then
        assert lengths[-1] > 1


def test_a_batch_of_two_requests_ends_at_different_times_in_most_cases() -> None:
    found = [lengths_of(seed, 0)[0] for seed in range(20)]
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
