"""Each token of each answer of a batch, whenever it was asked, after the engine's own tokens before
it is what an independent reference in fp64 with that request's adapter says. Where a case asks for
probabilities, each token has the one that the reference gives it."""

from __future__ import annotations

from collections.abc import Iterator

from loragate.core.sequential import Decision
from loragate.core.verdict import Failure, Judgement, OracleName, Verdict
from loragate.engine.evidence import Evidence
from loragate.engine.report import BASE
from loragate.engine.verdicts import MOST_NEAR_TIES
from loragate.oracles.engine.session import inapplicable, judged
from loragate.protocol import Trial


class Tokens:
    name = OracleName.TOKENS

    def applies(self, trial: Trial) -> str | None:
        return inapplicable(trial)

    def judge(self, trial: Trial) -> Judgement:
        return judged(self.name, trial, _judged)


def _judged(evidence: Evidence) -> Judgement:
    name, report = OracleName.TOKENS, evidence.report
    metrics = {
        "tokens": float(report.tokens),
        "log_odds_noise": report.log_odds_noise,
        "near_ties": float(report.near_ties),
        "noise": report.noise,
        "equal_texts": float(report.matches),
    }
    match report.decision:
        case Decision.FAIL:
            return _defective(evidence)
        case Decision.UNDECIDED:
            ties = f"{report.near_ties} of {report.tokens} tokens are near ties"
            message = f"{ties}, more than {MOST_NEAR_TIES:.0%}"
            return Judgement(name, Verdict.INCONCLUSIVE, message=message, metrics=metrics)
    return Judgement(name, Verdict.PASS, metrics=metrics)


def _defective(evidence: Evidence) -> Judgement:
    """All defects are told; the first one is the place."""
    first, metrics = evidence.report.problems[0], _errors(evidence)
    return Judgement(
        OracleName.TOKENS,
        Verdict.FAIL,
        Failure.WRONG_ANSWER,
        "\n".join((*_lines(evidence), evidence.bisection)).rstrip(),
        metrics,
        where={
            "request": first.request,
            "adapter": first.adapter or BASE,
            "token": first.position,
        },
    )


def _errors(evidence: Evidence) -> dict[str, float]:
    """A finding lists an error of tokens, not tokens that are missing, superfluous or none at all,
    and not probabilities of tokens that are right."""
    report = evidence.report
    if not report.defects:
        wrong = report.wrong_logprobs
        return {
            "wrong_logprobs": float(len(wrong)),
            "logprob_error": max(one.worst for one in wrong),
            "log_odds_noise": report.log_odds_noise,
        }
    metrics, gaps = {"defects": float(len(report.defects))}, [one.gap for one in report.defects]
    if _has_all_tokens(evidence) and None not in gaps:
        metrics |= {"error": max(gap for gap in gaps if gap is not None), "allowed": report.noise}
    return metrics


def _lines(evidence: Evidence) -> Iterator[str]:
    when = f"{evidence.when}: " if evidence.when else ""
    for found in evidence.report.problems:
        yield when + found.line()


def _has_all_tokens(evidence: Evidence) -> bool:
    return all(
        len(answer.tokens) == asked.request.wanted(answer.tokens)
        for asked, answer in zip(evidence.world.batch, evidence.judged, strict=True)
    )
