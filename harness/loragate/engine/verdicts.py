"""What the tokens of an engine say about it. Pure.

Each token is judged alone, after the engine's own tokens before it: equal to the reference's, a
near tie, or a defect. Free-running texts are compared as well, because that is what engines' own
tests do; but a text ends at its first difference, so that a rate of equal texts mixes defects with
near ties and cannot tell one from the other (vllm #35204).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from loragate.core.sequential import exact_interval


class TokenVerdict(Enum):
    RIGHT = "right"
    # the reference prefers another token by less than arithmetic may change
    NEAR_TIE = "near tie"
    DEFECT = "defect"


def token_verdict(gap: float, noise: float) -> TokenVerdict:
    """gap: how far the reference has its own token above the engine's; 0 where they are one.
    noise: how far a right engine's arithmetic may move one logit against another."""
    if gap == 0:
        return TokenVerdict.RIGHT
    return TokenVerdict.NEAR_TIE if gap <= noise else TokenVerdict.DEFECT


# a case in which more tokens are near ties says nothing
MOST_NEAR_TIES = 0.01


@dataclass(frozen=True, slots=True)
class MatchRatio:
    """`matches` of `requests` free-running texts are equal, with the exact interval of 95 %."""

    matches: int
    requests: int
    low: float
    high: float

    @classmethod
    def of(cls, texts: Sequence[Sequence[int]], wanted: Sequence[Sequence[int]]) -> MatchRatio:
        """ValueError where there are none, or not as many of both."""
        if not texts or len(texts) != len(wanted):
            raise ValueError(
                f"texts must be as many as the wanted ones, {len(wanted)}, and at least 1 "
                f"(got {len(texts)})"
            )
        matches = sum(list(a) == list(b) for a, b in zip(texts, wanted, strict=True))
        return cls.counted(matches, len(texts))

    @classmethod
    def counted(cls, matches: int, requests: int) -> MatchRatio:
        interval = exact_interval(matches, requests)
        return cls(matches, requests, interval.low, interval.high)


def chance_to_pass(rate: float, *, needed: int, requests: int) -> float:
    """How often a check that wants `needed` of `requests` equal texts passes, where each text is
    equal with a chance of `rate`, whatever the reason."""
    # takes a second to import, and few processes need it
    from scipy.stats import binom

    return float(binom.sf(needed - 1, requests, rate))
