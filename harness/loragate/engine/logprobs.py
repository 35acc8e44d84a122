"""Judges the probabilities that an engine gives the tokens of its answers."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor

from loragate.engine.reference import Judged, Reference, log_odds, log_sigmoid
from loragate.engine.report import WrongLogprobs
from loragate.engine.requests import Completion, Request

# of the root mean square of what the dtype changes: right engines, which round in other places,
# came as far as 5.0 times that (transformers with PEFT, bf16)
_ALLOWANCE = 8
# of a log-probability, besides: two fp32 numbers of up to a hundred, whose difference it is
_LEAST_NOISE = 1e-3


def squared_changes(exact: Tensor, low: Tensor, tokens: Sequence[int]) -> list[float]:
    """Of the log-odds of `tokens`, by the dtype. Logits [at least tokens, vocabulary] in fp64, and
    in the dtype of an engine."""
    said = torch.tensor(list(tokens), dtype=torch.int64)
    own, other = (log_odds(logits[: len(said)], said) for logits in (exact, low))
    squares: list[float] = (own - other).square().tolist()
    return squares


def log_odds_noise(squares: Sequence[float], most: float) -> float:
    """How far the log-odds of a right engine may be from those in fp64, by what was measured on
    all of its tokens, and `most` whatever was measured."""
    mean = sum(squares) / len(squares) if squares else 0.0
    return min(_ALLOWANCE * math.sqrt(mean), most)


def _is_right(given: float, odds: float, noise: float) -> bool:
    """Whether a log-probability is one of log-odds within `noise` of these. NaN is none."""
    low, high = (log_sigmoid(odds + shift) for shift in (-noise, noise))
    return low - _LEAST_NOISE <= given <= high + _LEAST_NOISE


def _error(given: float, wanted: float) -> float:
    """NaN is off by more than any number: the largest of several is not decided by their order."""
    return math.inf if math.isnan(given) else abs(given - wanted)


def distance(one: Completion, other: Completion) -> float:
    """Of two answers to a request: the largest difference of their log-probabilities, infinite
    where the tokens differ. 0 for equal tokens where no probabilities were asked for."""
    if one != other:
        return math.inf
    pairs = zip(one.logprobs or (), other.logprobs or (), strict=True)
    return max((_error(mine, known) for mine, known in pairs), default=0.0)


def wrong_logprobs(
    number: int,
    request: Request,
    completion: Completion,
    judged: Sequence[Judged],
    noise: float,
    *,
    names: Collection[str],
    reference: Callable[[str], Reference],
) -> WrongLogprobs | None:
    """Of a request whose tokens are right, as `judged` has them; `reference` of each of `names`;
    `noise` of log-odds. None if nothing is wrong, or no probabilities were given."""
    given = completion.logprobs
    if given is None:
        return None
    pairs = list(zip(given, judged, strict=True))
    wrong = [n for n, (mine, own) in enumerate(pairs) if not _is_right(mine, own.log_odds, noise)]
    if not wrong:
        return None

    def gives_them(name: str) -> bool:
        own = reference(name).judge(request.prompt, completion.tokens)
        return all(_is_right(given[place], own[place].log_odds, noise) for place in wrong)

    return WrongLogprobs(
        request=number,
        adapter=request.adapter,
        position=wrong[0],
        given=given[wrong[0]],
        wanted=judged[wrong[0]].logprob,
        wrong_tokens=len(wrong),
        worst=max(_error(given[place], judged[place].logprob) for place in wrong),
        said_by=tuple(name for name in names if gives_them(name)),
    )
