"""Each token of each answer of a mixed batch, after the engine's own tokens before it, is what an
independent reference in fp64 with that request's adapter says."""

from __future__ import annotations

from loragate.core.verdict import Failure, Judgement, OracleName, Verdict
from loragate.engine.evidence import Evidence
from loragate.engine.reference import Judged
from loragate.engine.verdicts import MOST_NEAR_TIES, TokenVerdict, token_verdict
from loragate.engine.world import Asked
from loragate.matrix.case import Dtype
from loragate.oracles.engine.session import inapplicable, judged
from loragate.protocol import Trial

# how far arithmetic in a dtype moves one logit of these checkpoints against another, of which the
# right one leads by 7 or more (docs/engine.md): two roundings of values up to 80
_NOISE = {Dtype.BF16: 2 * 80 * 2.0**-8, Dtype.FP16: 2 * 80 * 2.0**-11, Dtype.FP32: 0.01}


class Tokens:
    name = OracleName.TOKENS

    def applies(self, trial: Trial) -> str | None:
        return inapplicable(trial)

    def judge(self, trial: Trial) -> Judgement:
        noise = _NOISE[trial.case.dtype]
        return judged(self.name, trial, lambda evidence: _judged(evidence, noise))


def _judged(evidence: Evidence, noise: float) -> Judgement:
    name, counts = OracleName.TOKENS, dict.fromkeys(TokenVerdict, 0)
    for number, (asked, tokens) in enumerate(
        zip(evidence.world.batch, evidence.judged, strict=True)
    ):
        wanted = asked.request.new_tokens
        if len(tokens) != wanted:
            message = f"request {number} got {len(tokens)} tokens, {wanted} were asked for"
            return Judgement(name, Verdict.FAIL, Failure.WRONG_ANSWER, message)
        for place, token in enumerate(tokens):
            verdict = token_verdict(token.gap, noise)
            counts[verdict] += 1
            if verdict is TokenVerdict.DEFECT:
                return _defect(evidence, number, place, noise)
    total = sum(counts.values())
    ties = counts[TokenVerdict.NEAR_TIE]
    metrics = {"tokens": float(total), "near_ties": float(ties)}
    if ties > MOST_NEAR_TIES * total:
        message = f"{ties} of {total} tokens are near ties, more than {MOST_NEAR_TIES:.0%}"
        return Judgement(name, Verdict.INCONCLUSIVE, message=message, metrics=metrics)
    return Judgement(name, Verdict.PASS, metrics=metrics)


def _defect(evidence: Evidence, number: int, place: int, noise: float) -> Judgement:
    asked, tokens = evidence.world.batch[number], evidence.judged[number]
    token = tokens[place]
    adapter = asked.request.adapter or "the base model"
    whose = _whose(evidence, asked, tokens, place)
    message = (
        f"request {number} for {adapter}: token {place} is {token.token}, the reference says "
        f"{token.best}, whose logit is {token.gap:.3g} higher; {whose}"
    )
    return Judgement(
        OracleName.TOKENS,
        Verdict.FAIL,
        Failure.WRONG_ANSWER,
        message,
        metrics={"error": token.gap, "allowed": noise},
        where={"request": number, "adapter": adapter, "token": place},
    )


def _whose(evidence: Evidence, asked: Asked, tokens: tuple[Judged, ...], place: int) -> str:
    """Who says such a word after the one before it."""
    before = tokens[place - 1].token if place else asked.request.prompt[-1]
    world = evidence.world
    try:
        names = world.language.speakers_of(
            asked.prompt, before, tokens[place].token, world.speakers
        )
    except ValueError:
        names = []
    return f"it is what {', '.join(names)} says" if names else "nobody says it here"
