"""Judges what an engine has served, token by token.

The reference of a request's adapter is fed the request's own tokens. What it does not say itself is
a near tie or a defect; the bound between the two is measured on the same tokens, as the difference
between the reference in the dtype of the engine and in fp64, and has a limit besides. Who says the
tokens of a defect is asked of all references.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from loragate.engine.bisection import Deviation, Trace, first_deviation
from loragate.engine.layers.layout import LOUDNESS
from loragate.engine.logprobs import log_odds_noise, squared_changes, wrong_logprobs
from loragate.engine.reference import Judged, Reference
from loragate.engine.report import BASE, DRAFT, Defect, Report
from loragate.engine.requests import Completion, Request
from loragate.engine.verdicts import TokenVerdict, token_verdict

# an engine may be so many times as far from fp64 as the reference in its dtype: it adds in another
# order
_ALLOWANCE = 2
# whatever is measured: one rounding of each of two logits of the largest size. In fp32 that is less
# than sums in another order may differ by; its limit is a thousandth of a right token's lead
MOST_NOISE = {
    torch.bfloat16: 2 * LOUDNESS * 2.0**-8,
    torch.float16: 2 * LOUDNESS * 2.0**-11,
    torch.float32: 0.01,
}
# a logit that leads all others by so many times that is not overtaken: an engine rounds in other
# places than the reference in its dtype, which came as far as twice that in bf16
CLEAR = 3
# of modules: one with a merged adapter rounds once, elsewhere its product, the delta and their sum
# are rounded, and norms and gates enlarge that. Right adapters reached 4.2 (PEFT in bf16, hybrid)
_ALLOWANCE_OF_MODULES = 8
# in which modules are compared, whatever an engine computes in: fp32 may be exact by chance
_OF_MODULES = torch.bfloat16


class Judge:
    """Of engines that serve `model` with `adapters`, by the names of requests, and compute in
    `dtype`, which is fp32, bf16 or fp16. `draft`: the model whose drafts the engine verifies.
    ValueError for another dtype, and for a name that stands for something else.

    All of them are folders as `loragate.engine.folders` writes them.
    """

    def __init__(
        self,
        model: Path,
        adapters: Mapping[str, Path],
        *,
        dtype: torch.dtype = torch.bfloat16,
        draft: Path | None = None,
    ) -> None:
        if taken := {BASE, DRAFT} & set(adapters):
            raise ValueError(f"an adapter must not be called {taken.pop()!r}")
        if dtype not in MOST_NOISE:
            raise ValueError(f"dtype must be one of {[*MOST_NOISE]} (got {dtype})")
        self._model, self._draft, self._dtype = model, draft, dtype
        self._adapters: dict[str, Path | None] = {BASE: None, **adapters}
        self._exact: dict[str, Reference] = {}
        self._low: dict[tuple[str, torch.dtype], Reference] = {}

    def judge(self, requests: Sequence[Request], completions: Sequence[Completion]) -> Report:
        """ValueError for completions that are not as many as the requests, or none, and for a
        request that asks for nothing, names no adapter or has a prompt that the model cannot read.
        """
        if not requests or len(requests) != len(completions):
            raise ValueError(
                f"completions must be as many as the requests, {len(requests)}, and at least 1 "
                f"(got {len(completions)})"
            )
        for number, request in enumerate(requests):
            self._check(number, request)
        judged = [
            self._reference(request.adapter).judge(request.prompt, self._tokens(completion))
            for request, completion in zip(requests, completions, strict=True)
        ]
        measured = [self._noise(*one) for one in zip(requests, completions, strict=True)]
        most, limit = max(margin for margin, _ in measured), MOST_NOISE[self._dtype]
        noise = min(most, limit)
        wrong = [_wrong(*one, noise) for one in zip(requests, completions, judged, strict=True)]
        verdicts = [token_verdict(token.gap, noise) for tokens in judged for token in tokens]
        squares = [square for _, of_request in measured for square in of_request]
        of_odds = log_odds_noise(squares, CLEAR * limit)
        unlike = (
            wrong_logprobs(number, *one, of_odds, names=self._adapters, reference=self._reference)
            for number, one in enumerate(zip(requests, completions, judged, strict=True))
            if not wrong[number]
        )
        return Report(
            tokens=len(verdicts),
            near_ties=verdicts.count(TokenVerdict.NEAR_TIE),
            noise=noise,
            measured=most,
            defects=tuple(
                self._defect(number, requests, completions, judged, places)
                for number, places in enumerate(wrong)
                if places
            ),
            requests=len(requests),
            matches=sum(map(_is_own_text, requests, judged)),
            log_odds_noise=of_odds,
            wrong_logprobs=tuple(filter(None, unlike)),
        )

    def _noise(self, request: Request, completion: Completion) -> tuple[float, list[float]]:
        """How far an engine's arithmetic may move one logit against another on these tokens, and
        the squares of what the dtype changes their log-odds by."""
        answer = self._tokens(completion)
        exact, low = (
            reference.logits([*request.prompt, *answer])[len(request.prompt) - 1 :]
            for reference in (
                self._reference(request.adapter),
                self._rounded(request.adapter, self._dtype),
            )
        )
        top = exact.topk(2, dim=-1).indices
        margins = [logits.gather(-1, top).diff(dim=-1) for logits in (exact, low)]
        margin = _ALLOWANCE * float((margins[0] - margins[1]).abs().max())
        return margin, squared_changes(exact, low, answer)

    def bisect(self, request: Request, completion: Completion, trace: Trace) -> Deviation | None:
        """The first module of the engine, as `trace` shows it, that leaves the bound; None if none
        does. ValueError for what the model does not have."""
        tokens = [*request.prompt, *self._tokens(completion)]
        exact = self._reference(request.adapter).trace(tokens)
        low = self._rounded(request.adapter, _OF_MODULES).trace(tokens)
        shown = trace(tokens, request.adapter)
        floor = torch.finfo(_OF_MODULES).eps / 2
        return first_deviation(shown, exact, low, allowance=_ALLOWANCE_OF_MODULES, floor=floor)

    def _check(self, number: int, request: Request) -> None:
        size = self._reference(None).num_tokens
        if request.adapter is not None and request.adapter not in self._adapters:
            raise ValueError(
                f"request {number}: there is no adapter {request.adapter!r}; known are "
                f"{[*self._adapters]}"
            )
        if not request.prompt:
            raise ValueError(f"request {number}: the prompt must have a token (got none)")
        if unknown := [token for token in request.prompt if not 0 <= token < size]:
            raise ValueError(
                f"request {number}: tokens must be from 0 to {size - 1} (got {unknown[0]})"
            )
        if request.new_tokens < 1:
            raise ValueError(
                f"request {number}: new_tokens must be at least 1 (got {request.new_tokens})"
            )

    def _reference(self, adapter: str | None) -> Reference:
        name = BASE if adapter is None else adapter
        if name not in self._exact:
            if name == DRAFT:
                assert self._draft
                made = Reference(self._draft)
            else:
                made = Reference(self._model, self._adapters[name])
            self._exact[name] = made
        return self._exact[name]

    def _rounded(self, adapter: str | None, dtype: torch.dtype) -> Reference:
        key = BASE if adapter is None else adapter, dtype
        if key not in self._low:
            self._low[key] = self._reference(adapter).rounded(dtype)
        return self._low[key]

    def _tokens(self, completion: Completion) -> list[int]:
        """Up to the first one that no vocabulary has."""
        size = self._reference(None).num_tokens
        end = next((n for n, t in enumerate(completion.tokens) if not 0 <= t < size), None)
        return list(completion.tokens[:end])

    def _defect(
        self,
        number: int,
        requests: Sequence[Request],
        completions: Sequence[Completion],
        judged: Sequence[Sequence[Judged]],
        wrong: Sequence[int],
    ) -> Defect:
        request, completion, position = requests[number], completions[number], wrong[0]
        known = judged[number][position] if position < len(judged[number]) else None
        return Defect(
            request=number,
            adapter=request.adapter,
            position=position,
            token=completion.tokens[position] if position < len(completion.tokens) else None,
            wanted=known.best if known else None,
            gap=known.gap if known else None,
            wrong_tokens=len(wrong),
            said_by=self._said_by(request, completion, wrong),
            answer_to=self._answer_to(number, requests, completion, judged),
        )

    def _said_by(
        self, request: Request, completion: Completion, wrong: Sequence[int]
    ) -> tuple[str, ...]:
        """Those whose own tokens all wrong ones are, or else the first one."""
        answer = self._tokens(completion)
        places = [place for place in wrong if place < len(answer)]
        if not places:
            return ()
        names = [*self._adapters]
        # the first token of an answer is no draft
        if self._draft and places[0] > 0:
            names.append(DRAFT)
        said = {
            name: [
                best == token
                for best, token in zip(
                    self._reference(name).next_tokens(request.prompt, answer), answer, strict=True
                )
            ]
            for name in names
            if name != (request.adapter or BASE)
        }
        for wanted in (places, places[:1]):
            if found := tuple(n for n, same in said.items() if all(same[p] for p in wanted)):
                return found
        return ()

    def _answer_to(
        self,
        number: int,
        requests: Sequence[Request],
        completion: Completion,
        judged: Sequence[Sequence[Judged]],
    ) -> int | None:
        """The other request that these tokens are a right answer to."""
        answer = self._tokens(completion)
        for other, request in enumerate(requests):
            first = judged[other][0].best if judged[other] else None
            if other != number and answer and first == answer[0]:
                reference = self._reference(request.adapter)
                if reference.next_tokens(request.prompt, answer) == answer:
                    return other
        return None


def _wrong(
    request: Request, completion: Completion, judged: Sequence[Judged], noise: float
) -> list[int]:
    """The places of defects: of wrong tokens, of those that cannot be read, and of missing or
    superfluous ones."""
    wanted = request.wanted(completion.tokens)
    wrong = [
        place
        for place, token in enumerate(judged)
        if token_verdict(token.gap, noise) is TokenVerdict.DEFECT or place >= wanted
    ]
    return wrong + list(range(len(judged), max(wanted, len(completion.tokens))))


def _is_own_text(request: Request, judged: Sequence[Judged]) -> bool:
    """Whether the reference generates this text, by induction over its tokens."""
    wanted = request.wanted([token.token for token in judged])
    return len(judged) == wanted and all(token.gap == 0 for token in judged)
