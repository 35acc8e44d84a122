"""Judges the probabilities that an engine gives the tokens of its answers."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence

import torch
from torch import Tensor

from loragate.engine.reference import Judged, Reference
from loragate.engine.report import WrongLogprobs
from loragate.engine.requests import Completion, Request

# the largest of a few dozen differences is one of chance: right engines reached twice what was
# measured, in each dtype (transformers with PEFT)
_ALLOWANCE = 8
# at least: of two fp32 numbers of up to a hundred, whose difference it is; at most: a factor of e
_LEAST_NOISE, _MOST_NOISE = 1e-3, 1.0


def logprob_change(exact: Tensor, low: Tensor, tokens: Sequence[int]) -> float:
    """How far the dtype moves the log-probabilities of `tokens`. Logits [at least tokens,
    vocabulary] in fp64, and in the dtype of an engine."""
    said = torch.tensor(list(tokens), dtype=torch.int64)[:, None]
    if not len(said):
        return 0.0
    own, other = (logits[: len(said)].log_softmax(-1).gather(-1, said) for logits in (exact, low))
    return float((own - other).abs().max())


def logprob_noise(changes: Iterable[float]) -> float:
    """How far a right engine may be from fp64, by what was measured on its answers."""
    return min(max(_LEAST_NOISE, _ALLOWANCE * max(changes)), _MOST_NOISE)


def _error(given: float, wanted: float) -> float:
    """NaN is off by more than any number: the largest of several is not decided by their order."""
    return math.inf if math.isnan(given) else abs(given - wanted)


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
    """Of a request whose tokens are right, as `judged` has them; `reference` of each of `names`.
    None if nothing is wrong, or no probabilities were given."""
    given = completion.logprobs
    if given is None:
        return None
    errors = [_error(mine, token.logprob) for mine, token in zip(given, judged, strict=True)]
    wrong = [place for place, error in enumerate(errors) if error > noise]
    if not wrong:
        return None

    def gives_them(name: str) -> bool:
        own = reference(name).judge(request.prompt, completion.tokens)
        return all(abs(own[place].logprob - given[place]) <= noise for place in wrong)

    return WrongLogprobs(
        request=number,
        adapter=request.adapter,
        position=wrong[0],
        given=given[wrong[0]],
        wanted=judged[wrong[0]].logprob,
        wrong_tokens=len(wrong),
        worst=max(errors),
        said_by=tuple(name for name in names if gives_them(name)),
    )
