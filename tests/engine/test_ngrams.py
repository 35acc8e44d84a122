"""Where whatever drafter of n-grams must be right."""

from __future__ import annotations

import pytest

from loragate.engine.ngrams import is_drafted_right


@pytest.mark.parametrize(
    ("prompt", "answer", "is_right"),
    [
        # 8 has been followed by 3 each time
        ((8, 3, 1), (8, 3, 7), True),
        ((1, 2), (8, 3, 8, 3, 7), True),
        # once by something else
        ((8, 3, 8, 4), (8, 3, 7), False),
        # a token that is repeated follows itself, from its third time on
        ((1,), (5, 5, 5, 2), True),
        ((1,), (5, 5, 2), False),
        # nothing is known of the first one but the prompt, and the last one needs no draft
        ((8, 3, 8), (3, 1, 2), False),
        ((8, 3, 1), (8, 3), False),
        ((1, 2), (3, 4, 5, 6), False),
        ((1,), (), False),
    ],
)
def test_a_draft_is_right_where_the_last_token_was_always_followed_by_the_next_one(
    prompt: tuple[int, ...], answer: tuple[int, ...], is_right: bool
) -> None:
    assert is_drafted_right(prompt, answer) is is_right
