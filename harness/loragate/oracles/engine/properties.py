"""What must hold between the answers of an engine, whatever the right ones are: an adapter differs
from the base model; a permuted batch permutes its answers; a request alone is answered as in a
mixed batch; an adapter that was loaded again under its name gives the answers of its new weights,
also to a prompt whose prefix is kept."""

from __future__ import annotations

from collections.abc import Iterator

from loragate.core.sequential import Decision
from loragate.core.verdict import Failure, Judgement, OracleName, Verdict
from loragate.engine.evidence import Evidence
from loragate.engine.properties import (
    ALONE,
    DIFFERS,
    PERMUTES,
    RELOAD,
    Property,
    a_permuted_batch_permutes,
    adapters_differ_from_base,
    alone_equals_mixed,
    reload_serves_the_new_weights,
)
from loragate.matrix.engine_case import Weights
from loragate.oracles.engine.session import inapplicable, judged
from loragate.protocol import Trial

_FAILURES = {
    DIFFERS: Failure.WRONG_ANSWER,
    PERMUTES: Failure.NOT_EQUIVARIANT,
    ALONE: Failure.BATCH_DEPENDENT,
    RELOAD: Failure.STALE_STATE,
}


class EngineProperties:
    name = OracleName.ENGINE_PROPERTIES

    def applies(self, trial: Trial) -> str | None:
        return inapplicable(trial)

    def judge(self, trial: Trial) -> Judgement:
        return judged(self.name, trial, _judged)


def _judged(evidence: Evidence) -> Judgement:
    name, found = OracleName.ENGINE_PROPERTIES, list(_properties(evidence))
    broken = [one for one in found if one.decision is Decision.FAIL]
    if broken:
        # what else is broken is no part of a listed finding
        metrics = {"problems": float(sum(len(one.details) for one in broken))}
        return Judgement(
            name,
            Verdict.FAIL,
            _FAILURES[broken[0].name],
            broken[0].details[0],
            metrics,
            where={"property": broken[0].name},
        )
    undecided = [detail for one in found for detail in one.details]
    if undecided:
        return Judgement(name, Verdict.INCONCLUSIVE, message="; ".join(undecided))
    return Judgement(name, Verdict.PASS)


def _properties(evidence: Evidence) -> Iterator[Property]:
    world, answers = evidence.world, evidence.answers
    last = world.batch[world.last].request
    yield from _differ(evidence)
    yield a_permuted_batch_permutes(answers.mixed, answers.permuted)
    yield alone_equals_mixed(world.last, answers.mixed[world.last], answers.alone)
    if world.exchange is not None and answers.exchange is not None:
        yield reload_serves_the_new_weights(
            str(last.adapter),
            world.exchange.other,
            before=answers.alone,
            after=answers.exchange.again,
            wanted=answers.exchange.other,
            defects=[found.line() for found in evidence.reloaded.problems]
            if evidence.reloaded
            else (),
        )


def _differ(evidence: Evidence) -> Iterator[Property]:
    """Of each prompt that the base model has, too."""
    if evidence.world.weights is Weights.RANDOM:
        # their first tokens may be the same by chance; the reference knows
        return
    pairs = list(zip(evidence.world.batch, evidence.answers.mixed, strict=True))
    for base, said in pairs:
        if base.request.adapter is None:
            adapted = {
                asked.request.adapter: answer
                for asked, answer in pairs
                if asked.request.adapter and asked.prompt == base.prompt
            }
            yield adapters_differ_from_base(said, adapted)
