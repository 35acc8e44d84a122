"""What must hold between the answers of an engine, whatever the right ones are: an adapter differs
from the base model; a permuted batch permutes its answers; a request alone is answered as in a
mixed batch; an adapter that was loaded again under its name gives the answers of its new weights,
also to a prompt whose prefix is kept."""

from __future__ import annotations

from collections.abc import Iterator

from loragate.core.verdict import Failure, Judgement, OracleName, Verdict
from loragate.engine.evidence import Evidence
from loragate.engine.requests import Completion
from loragate.oracles.engine.session import inapplicable, judged
from loragate.protocol import Trial


class EngineProperties:
    name = OracleName.ENGINE_PROPERTIES

    def applies(self, trial: Trial) -> str | None:
        return inapplicable(trial)

    def judge(self, trial: Trial) -> Judgement:
        return judged(self.name, trial, _judged)


def _judged(evidence: Evidence) -> Judgement:
    name = OracleName.ENGINE_PROPERTIES
    broken = {
        problems.__name__.removeprefix("_"): found
        for problems in (_without_adapter, _permuted, _alone, _exchanged)
        if (found := list(problems(evidence)))
    }
    if not broken:
        if untold := _untold(evidence):
            return Judgement(name, Verdict.INCONCLUSIVE, message=untold)
        return Judgement(name, Verdict.PASS)
    failure, message = next(iter(broken.values()))[0]
    # what else is broken is no part of a listed finding
    metrics = {"problems": float(sum(map(len, broken.values())))}
    where: dict[str, int | str] = {"property": next(iter(broken))}
    return Judgement(name, Verdict.FAIL, failure, message, metrics, where)


def _without_adapter(evidence: Evidence) -> Iterator[tuple[Failure, str]]:
    pairs = list(zip(evidence.world.batch, evidence.mixed, strict=True))
    for base, said in pairs:
        for asked, answer in pairs:
            adapter, is_of_base = asked.request.adapter, base.request.adapter is None
            # later words may be the same by chance, the first ones are not
            if (
                adapter
                and is_of_base
                and asked.prompt == base.prompt
                and answer.tokens[:1] == said.tokens[:1]
            ):
                message = f"{adapter} answers as the base model: {_text(answer)}"
                yield Failure.WRONG_ANSWER, message


def _permuted(evidence: Evidence) -> Iterator[tuple[Failure, str]]:
    for number, (mixed, permuted) in enumerate(zip(evidence.mixed, evidence.permuted, strict=True)):
        if mixed != permuted:
            message = (
                f"request {number} is answered {_text(permuted)} in another place of the same "
                f"batch (before: {_text(mixed)})"
            )
            yield Failure.NOT_EQUIVARIANT, message


def _alone(evidence: Evidence) -> Iterator[tuple[Failure, str]]:
    last = evidence.world.last
    alone, mixed = evidence.alone, evidence.mixed[last]
    if alone != mixed:
        message = f"request {last} is answered {_text(alone)} alone and {_text(mixed)} in a batch"
        yield Failure.BATCH_DEPENDENT, message


def _exchanged(evidence: Evidence) -> Iterator[tuple[Failure, str]]:
    world, found = evidence.world, evidence.exchange
    if world.exchange is None or found is None:
        return
    if found.again != found.other:
        name, other = world.batch[world.last].request.adapter, world.exchange.other
        still = "as before, " if found.again == evidence.alone else ""
        message = (
            f"{name} with the weights of {other} answers {still}{_text(found.again)}, "
            f"{other} itself {_text(found.other)}"
        )
        yield Failure.STALE_STATE, message


def _untold(evidence: Evidence) -> str:
    """What the answers cannot show, "" if there is nothing: an exchange of weights that answer the
    same would be right if the old ones were kept."""
    world, found = evidence.world, evidence.exchange
    if world.exchange is None or found is None or found.other != evidence.alone:
        return ""
    name, other = world.batch[world.last].request.adapter, world.exchange.other
    return f"{name} and {other} answer the same, so that an exchange of their weights shows nothing"


def _text(answer: Completion) -> str:
    return " ".join(map(str, answer.tokens))
