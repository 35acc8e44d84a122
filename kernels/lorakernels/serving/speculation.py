"""Drafts: tokens that a request may get next, guessed without its model, and their acceptance.

A drafter guesses; the decoder computes what it would have said after each guess, in one step and
with the request's own adapter. What is kept of the guesses is what it would have said itself, so
that a drafter changes how many steps an answer takes, never the answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from lorakernels.adapters.errors import AdapterError
from lorakernels.serving.decoder import Decoder


@dataclass(frozen=True, slots=True)
class Text:
    """Of a request: its prompt and what it was answered so far, and the name of its adapter."""

    tokens: Sequence[int]
    adapter: str | None


@dataclass(frozen=True, slots=True)
class DraftCounts:
    """Drafts that became part of an answer, and all others that were verified."""

    accepted: int = 0
    rejected: int = 0

    def plus(self, accepted: int, verified: int) -> DraftCounts:
        """With `verified` more drafts, of which `accepted` were accepted."""
        return DraftCounts(self.accepted + accepted, self.rejected + verified - accepted)


class Drafter(Protocol):
    """Follows the lines of a decoder. It is told of each request that joins, moves or leaves."""

    @property
    def decoders(self) -> Sequence[Decoder]:
        """Decoders whose lines it writes to."""

    def check(self, decoder: Decoder) -> None:
        """ValueError if it cannot draft for this decoder."""

    def join(self, first_line: int, texts: Sequence[Text]) -> None:
        """Requests are in the lines from `first_line` on, before their first token."""

    def move(self, source: int, target: int) -> None:
        """The request of a line is in another line now."""

    def propose(self, texts: Sequence[Text], counts: Sequence[int]) -> list[list[int]]:
        """Up to `counts` drafts for the request of each line, in the order of the lines. It is
        called before each step of the decoder but one that ends all requests."""


class NgramDrafts:
    """Drafts what followed the last tokens of a text when they stood in it before.

    longest: how many of the last tokens are looked up; fewer ones, down to one, where they were
    not found. The latest place counts.
    """

    decoders: Sequence[Decoder] = ()

    def __init__(self, longest: int = 3) -> None:
        if longest < 1:
            raise ValueError(f"longest must be at least 1 (got {longest})")
        self._longest = longest

    def check(self, decoder: Decoder) -> None:
        pass

    def join(self, first_line: int, texts: Sequence[Text]) -> None:
        pass

    def move(self, source: int, target: int) -> None:
        pass

    def propose(self, texts: Sequence[Text], counts: Sequence[int]) -> list[list[int]]:
        return [
            self._continued(text.tokens, count) for text, count in zip(texts, counts, strict=True)
        ]

    def _continued(self, tokens: Sequence[int], count: int) -> list[int]:
        best = place = 0
        for end in reversed(range(1, len(tokens))):
            # of most places it is enough to look at one token
            if tokens[end - 1] == tokens[-1] and (length := self._repeated(tokens, end)) > best:
                best, place = length, end
                if best == self._longest:
                    break
        return list(tokens[place : place + count]) if best else []

    def _repeated(self, tokens: Sequence[int], end: int) -> int:
        """How many of the last tokens stand right before `end` as well."""
        length, most = 0, min(self._longest, end)
        while length < most and tokens[end - 1 - length] == tokens[-1 - length]:
            length += 1
        return length


class ModelDrafts:
    """Drafts what another, smaller model says: a decoder of its own, with a line for each line of
    the verifying one. A request has its adapter in it where an adapter of that name is resident
    there, else none.

    Invariant: before `propose` the decoder holds the text of each line but for its last token. It
    therefore reads the last draft, too, of which nothing is asked.
    """

    def __init__(self, decoder: Decoder) -> None:
        if not decoder.takes_back:
            raise ValueError(
                "the model of drafts must have no gated delta nets, whose state cannot be taken "
                "back from a rejected draft"
            )
        self._decoder = decoder

    @property
    def decoders(self) -> Sequence[Decoder]:
        return (self._decoder,)

    def check(self, decoder: Decoder) -> None:
        """Lines, prompts and vocabulary of `decoder` must fit; drafts go beyond its last token."""
        own = self._decoder
        for name, have, need in (
            ("max_requests", own.max_requests, decoder.max_requests),
            ("max_prompt_tokens", own.max_prompt_tokens, decoder.max_prompt_tokens),
            ("max_length", own.max_length, decoder.max_length + decoder.num_drafts),
        ):
            if have < need:
                raise ValueError(f"{name} of the drafts must be at least {need} (got {have})")
        sizes = own.config.vocab_size, decoder.config.vocab_size
        if sizes[0] != sizes[1]:
            raise ValueError(f"drafts must have the vocabulary of {sizes[1]} (got {sizes[0]})")

    def join(self, first_line: int, texts: Sequence[Text]) -> None:
        prompts = [text.tokens for text in texts]
        self._decoder.prefill(prompts, self._slots(texts), first_line=first_line)

    def move(self, source: int, target: int) -> None:
        self._decoder.cache.move(source, target)

    def propose(self, texts: Sequence[Text], counts: Sequence[int]) -> list[list[int]]:
        slots, drafts = self._slots(texts), [list[int]() for _ in texts]
        tokens = [text.tokens[-1] for text in texts]
        positions = [len(text.tokens) - 1 for text in texts]
        most = max(counts)
        for ahead in range(most + 1 if most else 0):
            logits = self._decoder.decode(tokens, [p + ahead for p in positions], slots)
            if ahead < most:
                tokens = logits.argmax(dim=-1).tolist()
                for own, token in zip(drafts, tokens, strict=True):
                    own.append(token)
        return [own[:count] for own, count in zip(drafts, counts, strict=True)]

    def _slots(self, texts: Sequence[Text]) -> list[int]:
        return [self._slot(text.adapter) for text in texts]

    def _slot(self, adapter: str | None) -> int:
        if adapter is None:
            return -1
        try:
            return self._decoder.slots.slot_of(adapter)
        except AdapterError:
            return -1


def accepted_drafts(drafts: Sequence[int], chosen: Sequence[int]) -> int:
    """How many of the first drafts are what the decoder itself chose. `chosen`: its token behind
    the last one of the text and behind each draft."""
    count = 0
    while count < len(drafts) and drafts[count] == chosen[count]:
        count += 1
    return count
