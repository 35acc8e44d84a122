"""Drafts of n-grams: what each engine that looks them up must find, however it does. Pure."""

from __future__ import annotations

from collections.abc import Sequence


def is_drafted_right(prompt: Sequence[int], answer: Sequence[int]) -> bool:
    """Whether a drafter must be right once in an answer, whichever of the places before that end
    as the text does it takes, and however much of their ends must be the same: whatever followed
    the last token is the next one. Not of the first token, which the prompt gives, nor of the last
    one, before which there is no room for a draft and the token behind it."""
    text = [*prompt, *answer]
    return any(
        _followers(text[:end]) == {text[end]} for end in range(len(prompt) + 1, len(text) - 1)
    )


def _followers(text: Sequence[int]) -> set[int]:
    """The tokens behind each token of a text that is its last one, too."""
    return {text[place + 1] for place, token in enumerate(text[:-1]) if token == text[-1]}
