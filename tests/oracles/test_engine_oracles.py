"""What the oracles of engines say about answers of which some are wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from loragate.core.machine import Machine
from loragate.core.verdict import Failure, OracleName, Verdict
from loragate.engine.evidence import Evidence, Exchange
from loragate.engine.process import EngineError, EngineNotStarted
from loragate.engine.reference import Judged
from loragate.engine.requests import Completion, EngineCounts
from loragate.engine.world import World, build_world
from loragate.matrix.case import Case, Dtype, Site
from loragate.matrix.engine_case import ENGINE_ORACLES, Active, Graphs, Model, Speculation
from loragate.oracles import ORACLES
from loragate.oracles.engine import session
from loragate.protocol import CheckedSubject, Trial
from loragate.run.trial import run_trial
from loragate.subjects.transformers.subject import TransformersSubject

CPU = Machine("cpu", "test", None, 1, 0)
CASE = Case(
    site=Site.ENGINE,
    rank=8,
    slots=2,
    dtype=Dtype.FP32,
    speculation=Speculation.NGRAM,
    oracles=(OracleName.TOKENS, OracleName.ENGINE_PROPERTIES, OracleName.LIVENESS),
)
COUNTS = EngineCounts(3, 2, 1, 9)
Collect = Callable[..., Evidence]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return build_world(CASE, 5, tmp_path_factory.mktemp("world"))


def right(world: World) -> Evidence:
    """The evidence of an engine without a defect."""
    answers = tuple(
        Completion(tuple(world.language.words_after(a.prompt, a.speaker, a.request.new_tokens)))
        for a in world.batch
    )
    judged = tuple(tuple(Judged(t, t, 0.0, 8.0) for t in answer.tokens) for answer in answers)
    other = Completion((1, 2))
    return Evidence(
        world, answers, judged, answers, answers[world.last], Exchange(other, other), COUNTS
    )


def verdicts(
    monkeypatch: pytest.MonkeyPatch, found: Evidence | EngineError, case: Case = CASE
) -> dict[OracleName, Any]:
    def collect(*given: object) -> Evidence:
        if isinstance(found, EngineError):
            raise found
        return found

    monkeypatch.setattr(session, "collect", collect)
    subject = TransformersSubject()
    have = subject.capabilities(CPU)
    assert not isinstance(have, str)
    trial = Trial(case, CheckedSubject(subject), have, CPU, seed=3)
    return {judgement.oracle: judgement for judgement in run_trial(trial)}


def failing(found: dict[OracleName, Any]) -> dict[OracleName, Failure]:
    return {n: j.failure for n, j in found.items() if j.verdict is not Verdict.PASS}


def test_an_engine_without_a_defect_passes(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    found = verdicts(monkeypatch, right(world))
    assert failing(found) == {}
    assert found[OracleName.TOKENS].metrics["tokens"] == sum(
        asked.request.new_tokens for asked in world.batch
    )


def test_a_word_of_another_adapter_is_a_defect_that_names_it(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    evidence = right(world)
    number = next(n for n, a in enumerate(world.batch) if a.request.adapter is not None)
    asked = world.batch[number]
    other = next(s for s in world.speakers[1:] if s.name != asked.speaker.name)
    word = world.language.next_word(asked.prompt, asked.request.prompt[-1], other)
    tokens = list(evidence.judged[number])
    tokens[0] = Judged(word, tokens[0].best, 9.0, 8.0)
    judged = (*evidence.judged[:number], tuple(tokens), *evidence.judged[number + 1 :])
    found = verdicts(monkeypatch, replace(evidence, judged=judged))
    assert failing(found) == {OracleName.TOKENS: Failure.WRONG_ANSWER}
    judgement = found[OracleName.TOKENS]
    assert f"it is what {other.name} says" in judgement.message
    assert judgement.where["adapter"] == asked.request.adapter
    assert judgement.where["token"] == 0


def test_a_short_answer_fails_and_too_many_near_ties_are_inconclusive(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    evidence = right(world)
    short = (evidence.judged[0][:-1], *evidence.judged[1:])
    found = verdicts(monkeypatch, replace(evidence, judged=short))
    assert failing(found) == {OracleName.TOKENS: Failure.WRONG_ANSWER}
    tied = tuple(tuple(replace(t, gap=0.005) for t in tokens) for tokens in evidence.judged)
    found = verdicts(monkeypatch, replace(evidence, judged=tied))
    assert found[OracleName.TOKENS].verdict is Verdict.INCONCLUSIVE


def test_each_property_that_is_broken_fails(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    evidence, odd = right(world), Completion((0, 0, 0, 0))
    shared = [n for n, a in enumerate(world.batch) if n != world.last]
    base = next(n for n in shared if world.batch[n].request.adapter is None)
    said = evidence.mixed[base]
    as_base = tuple(said if n in shared else c for n, c in enumerate(evidence.mixed))
    for changed, failure, message in (
        (
            {"mixed": as_base, "permuted": as_base},
            Failure.WRONG_ANSWER,
            "answers as the base model",
        ),
        (
            {"permuted": (odd, *evidence.permuted[1:])},
            Failure.NOT_EQUIVARIANT,
            "request 0 is answered 0 0 0 0 in another place",
        ),
        ({"alone": odd}, Failure.BATCH_DEPENDENT, "is answered 0 0 0 0 alone"),
        (
            {"exchange": Exchange(evidence.alone, odd)},
            Failure.STALE_STATE,
            "answers as before, ",
        ),
    ):
        found = verdicts(monkeypatch, replace(evidence, **changed))  # type: ignore[arg-type]
        assert failing(found) == {OracleName.ENGINE_PROPERTIES: failure}
        assert message in found[OracleName.ENGINE_PROPERTIES].message
    both = {"alone": odd, "exchange": Exchange(evidence.alone, odd)}
    found = verdicts(monkeypatch, replace(evidence, **both))  # type: ignore[arg-type]
    # a listed finding of one property does not excuse another one
    judgement = found[OracleName.ENGINE_PROPERTIES]
    assert judgement.metrics == {"problems": 2.0}
    assert judgement.where == {"property": "alone"}


def test_an_exchange_of_weights_that_answer_the_same_decides_nothing(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    evidence = right(world)
    same = replace(evidence, exchange=Exchange(evidence.alone, evidence.alone))
    found = verdicts(monkeypatch, same)[OracleName.ENGINE_PROPERTIES]
    assert found.verdict is Verdict.INCONCLUSIVE
    assert "answer the same" in found.message


@pytest.mark.parametrize(
    ("axes", "counts", "idle"),
    [
        ({}, EngineCounts(0, 2, 0, 1), "drafts accepted"),
        ({}, EngineCounts(1, 0, 0, 1), "drafts rejected"),
        ({"graphs": Graphs.FULL}, EngineCounts(1, 1, 0, 1), "graphs replayed"),
        ({}, EngineCounts(1, 1, 0, 0), "kernels launched"),
    ],
)
def test_what_a_case_asks_for_and_does_not_happen_fails(
    world: World,
    monkeypatch: pytest.MonkeyPatch,
    axes: dict[str, Any],
    counts: EngineCounts,
    idle: str,
) -> None:
    evidence = replace(right(world), counts=counts)
    found = verdicts(monkeypatch, evidence, replace(CASE, **axes))
    assert failing(found) == {OracleName.LIVENESS: Failure.IDLE}
    assert found[OracleName.LIVENESS].message.endswith(f"asks for them: {idle}")


def test_what_nobody_counts_or_asks_for_is_not_judged(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    nothing = replace(right(world), counts=EngineCounts(None, None, None, None))
    found = verdicts(monkeypatch, nothing)[OracleName.LIVENESS]
    assert found.verdict is Verdict.SKIP
    assert "does not count drafts accepted, drafts rejected" in found.message
    idle = replace(right(world), counts=EngineCounts(0, 0, 0, 0))
    plain = replace(CASE, speculation=Speculation.NONE, active=Active.NONE)
    assert verdicts(monkeypatch, idle, plain)[OracleName.LIVENESS].verdict is Verdict.SKIP


def test_counts_that_pass_name_the_ones_that_nobody_knows(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    some = replace(right(world), counts=EngineCounts(3, 2, None, None))
    case = replace(CASE, graphs=Graphs.FULL)
    found = verdicts(monkeypatch, some, case)[OracleName.LIVENESS]
    assert found.verdict is Verdict.PASS
    assert found.message == "the engine does not count graphs replayed, kernels launched"
    assert found.metrics == {"drafts accepted": 3.0, "drafts rejected": 2.0}


def test_an_engine_that_does_not_start_is_infra_and_one_that_fails_is_at_fault(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = verdicts(monkeypatch, EngineNotStarted("no memory"))
    assert {(j.verdict, j.failure) for j in found.values()} == {
        (Verdict.INFRA, Failure.NOT_STARTED)
    }
    found = verdicts(monkeypatch, EngineError("generate raised"))
    assert {(j.verdict, j.failure) for j in found.values()} == {(Verdict.FAIL, Failure.EXCEPTION)}


def test_a_repeat_of_a_trial_runs_the_engine_again_and_its_oracles_share_a_run(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    collected: list[Path] = []
    evidence = right(world)

    def collect(target: str, *given: object) -> Evidence:
        collected.append(Path(target))
        return evidence

    monkeypatch.setattr(session, "collect", collect)
    subject = TransformersSubject()
    have = subject.capabilities(CPU)
    assert not isinstance(have, str)
    for _ in range(2):
        run_trial(Trial(CASE, CheckedSubject(subject), have, CPU, seed=3))
    assert len(collected) == 2


def test_no_oracle_of_engines_judges_tensors_or_what_has_no_checkpoint() -> None:
    subject = TransformersSubject()
    have = subject.capabilities(CPU)
    assert not isinstance(have, str)
    dense = Case(site=Site.DENSE_DELTA, rank=8, slots=2, dtype=Dtype.FP32)
    for case, reason in (
        (dense, "judges engines"),
        (replace(CASE, model=Model.HYBRID), "no checkpoint for model hybrid"),
    ):
        trial = Trial(case, CheckedSubject(subject), have, CPU, seed=3)
        for name in ENGINE_ORACLES:
            assert reason in str(ORACLES[name].applies(trial))
