"""The tokens that logits prefer, and what they give them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Said(NamedTuple):
    """Tokens of a request, one behind the other, and the natural logarithms of their probabilities,
    or none."""

    tokens: list[int]
    logprobs: list[float]


def most_likely(logits: Tensor, *, logprobs: bool) -> list[Said]:
    """Of each request. logits [requests, width, vocabulary], whose softmax, in fp32 at least, are
    the probabilities."""
    chosen = logits.argmax(dim=-1)
    # the only place where the host waits for the device, and once
    if not logprobs:
        return [Said(tokens, []) for tokens in chosen.tolist()]
    sums = torch.logsumexp(logits.float(), dim=-1)
    values = logits.gather(-1, chosen[..., None])[..., 0] - sums
    # a token is a number below 2**53
    both = torch.stack([chosen.double(), values.double()], dim=1).tolist()
    return [Said([int(token) for token in tokens], own) for tokens, own in both]
