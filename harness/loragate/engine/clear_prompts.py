"""Prompts whose answers no rounding changes.

With random weights the best two tokens may be as close as what 16 bits round, and an engine that is
right says either. One of the last tokens of a prompt is drawn anew until the reference prefers each
token of its own answer by more than that; and until the answer does not merely repeat one, which is
the clearest of all and says nothing about what is kept. Some models do so after nearly every
prompt: there the search ends, and whoever asked draws another model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random

import torch

from loragate.engine.batch import Asked
from loragate.engine.judge import CLEAR, MOST_NOISE
from loragate.engine.language import PLACES, Language
from loragate.engine.reference import Reference
from loragate.engine.requests import Request

# of a few tokens that repeat each other, hardly any depends on the others
_LEAST_DISTINCT = 4
# so many tokens before the last one are drawn anew: prompts have all others in common
_LAST = 4
# of prompts for one request. Most models need a hundred at most; one that needs more than this may
# need thousands, a minute or ten, where another model is written in a second
_MOST_PROMPTS = 500


class NoClearPrompt(Exception):
    """A model with none among many prompts."""


class ClearPrompts:
    """Of engines that serve `model` with `adapters`, both of them folders, in `dtype`."""

    def __init__(
        self,
        model: Path,
        adapters: Mapping[str, Path],
        language: Language,
        dtype: torch.dtype,
        random: Random,
    ) -> None:
        self._model, self._adapters = model, adapters
        self._language, self._random = language, random
        self._least = CLEAR * MOST_NOISE[dtype]
        self._references: dict[str | None, Reference] = {}

    def made(self, asked: Asked, others: Sequence[str] = ()) -> Asked:
        """The same with another prompt, if need be. `others`: adapters whose answers to it must be
        clear, too. Raises NoClearPrompt."""
        request = asked.request
        for _ in range(_MOST_PROMPTS):
            if self._is_clear(request, others):
                return replace(asked, request=request)
            prompt = [*request.prompt]
            prompt[-1 - self._random.randint(1, _LAST)] = self._token()
            request = replace(request, prompt=tuple(prompt))
        who = request.adapter or "the model"
        raise NoClearPrompt(f"none of {_MOST_PROMPTS} prompts has a clear answer of {who}")

    def answer(self, asked: Asked) -> list[int]:
        """To a prompt that was made clear."""
        return self._sure_answer(asked.request)

    def _is_clear(self, request: Request, others: Sequence[str]) -> bool:
        answers = []
        for name in (request.adapter, *others):
            answer = self._sure_answer(replace(request, adapter=name))
            if len(answer) < request.new_tokens:
                return False
            answers.append(answer)
        return len(set(answers[0])) >= _LEAST_DISTINCT

    def _sure_answer(self, request: Request) -> list[int]:
        """Up to the first token that is not clear."""
        reference = self._reference(request.adapter)
        return reference.sure_answer(request.prompt, request.new_tokens, self._least)

    def _token(self) -> int:
        cycle, place = (self._random.randrange(n) for n in (self._language.cycles, PLACES))
        return self._language.word(cycle, place)

    def _reference(self, adapter: str | None) -> Reference:
        if adapter not in self._references:
            folder = None if adapter is None else self._adapters[adapter]
            self._references[adapter] = Reference(self._model, folder)
        return self._references[adapter]
