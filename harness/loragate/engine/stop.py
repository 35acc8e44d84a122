"""Tokens that end answers, so that a batch shrinks while it is decoded and its rows move.

All requests of a batch name the same ones, because an engine may have them for a whole batch only.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import product

from loragate.engine.batch import Asked
from loragate.engine.requests import Request


def with_stop(batch: Sequence[Asked], answers: Sequence[Sequence[int]]) -> list[Asked]:
    """The same requests with two such tokens. `answers`: as the reference gives them, each as long
    as its request wants without them.

    As far as the batch allows, one answer ends with its first token, one behind it and one not
    before its limit, drafts of n-grams lead beyond the end of one, and as many as possible have
    different lengths. The last one, which is asked alone as well, has two tokens at least.
    """
    requests = [asked.request for asked in batch]
    stop = max(_candidates(answers), key=lambda stop: _spread(requests, answers, stop))
    return [replace(asked, request=replace(asked.request, stop=stop)) for asked in batch]


def _candidates(answers: Sequence[Sequence[int]]) -> Iterable[tuple[int, ...]]:
    """The first token of an answer, and a later one of any."""
    firsts = dict.fromkeys(answer[0] for answer in answers)
    later = dict.fromkeys(token for answer in answers for token in answer[1:])
    return product(firsts, later)


def _spread(
    requests: Sequence[Request], answers: Sequence[Sequence[int]], stop: tuple[int, ...]
) -> tuple[bool, int, bool, int]:
    """Larger where answers end in more ways."""
    lengths = [
        replace(request, stop=stop).wanted(answer)
        for request, answer in zip(requests, answers, strict=True)
    ]
    # at the first token, at the limit, or in between
    ways = {
        (length == 1, length == len(answer))
        for length, answer in zip(lengths, answers, strict=True)
    }
    is_passed = any(map(_is_passed_by_drafts, requests, answers, lengths))
    return lengths[-1] > 1, len(ways), is_passed, len(set(lengths))


def _is_passed_by_drafts(request: Request, answer: Sequence[int], length: int) -> bool:
    """Whether the prompt has an answer that ends behind `length` tokens with the one that would
    follow: an n-gram behind its first token drafts all of them."""
    prompt, sample = request.prompt, tuple(answer[: length + 1])
    places = range(len(prompt) - len(sample) + 1)
    return 1 < length < len(answer) and any(
        prompt[place : place + len(sample)] == sample for place in places
    )
