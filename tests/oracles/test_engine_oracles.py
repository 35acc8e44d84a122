"""What the oracles of engines say about answers of which some are wrong."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from loragate.core.machine import Machine
from loragate.core.verdict import Failure, OracleName, Verdict
from loragate.engine.evidence import Evidence, Exchange, examined
from loragate.engine.judge import Judge
from loragate.engine.process import EngineBreach, EngineError, EngineNotStarted
from loragate.engine.properties import ALONE
from loragate.engine.reference import Reference
from loragate.engine.requests import Completion, EngineCounts, Request
from loragate.engine.world import World, build_world
from loragate.matrix.case import Case, Dtype, Site
from loragate.matrix.engine_case import ENGINE_ORACLES, Active, Graphs, Speculation
from loragate.oracles import ORACLES
from loragate.oracles.engine import session
from loragate.protocol import CheckedSubject, Trial
from loragate.run.trial import run_trial
from loragate.subjects.transformers.subject import TransformersSubject

from .speaking_engine import COUNTS, WARM_UP, Speaking

CPU = Machine("cpu", "test", None, 1, 0)
CASE = Case(
    site=Site.ENGINE,
    rank=8,
    slots=2,
    dtype=Dtype.FP32,
    speculation=Speculation.NGRAM,
    oracles=(OracleName.TOKENS, OracleName.ENGINE_PROPERTIES, OracleName.LIVENESS),
)
Collect = Callable[..., Evidence]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return build_world(CASE, 5, tmp_path_factory.mktemp("world"))


class WithoutAdapters(Speaking):
    def answer(self, request: Request) -> tuple[int, ...]:
        return super().answer(replace(request, adapter=None))


class OfTheFirstRow(Speaking):
    """Serves a batch with the adapter of its first request."""

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        return super().generate([replace(r, adapter=requests[0].adapter) for r in requests])


class WrongAlone(Speaking):
    """Serves a request alone with another adapter than its own."""

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        if len(requests) > 1:
            return super().generate(requests)
        other = next(name for name in self.loaded if name not in (None, requests[0].adapter))
        return super().generate([replace(requests[0], adapter=other)])


class Remembering(Speaking):
    """Answers what it has answered to the same prompt under the same name."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.cache: dict[Request, tuple[int, ...]] = {}

    def answer(self, request: Request) -> tuple[int, ...]:
        return self.cache.setdefault(request, super().answer(request))


class Dropping(Speaking):
    """Serves the base model under a name that was taken when it was loaded."""

    def load(self, name: str, folder: Path) -> None:
        known = name in self.loaded
        super().load(name, folder)
        if known:
            self.loaded[name] = self.language.base()


class Broken(Speaking):
    """Serves the base model to everybody once a name was taken when it was loaded."""

    def load(self, name: str, folder: Path) -> None:
        known = name in self.loaded
        super().load(name, folder)
        if known:
            self.loaded = dict.fromkeys(self.loaded, self.language.base())


class Idle(Speaking):
    """Does nothing that is counted once it has started."""

    def counts(self) -> EngineCounts:
        return WARM_UP


class CountingTheLastCall(Speaking):
    """Says what it did since it was asked before, as if that were since the start."""

    def counts(self) -> EngineCounts:
        return COUNTS if self.calls else WARM_UP


class Showing(WithoutAdapters):
    """Shows that its modules have no adapter."""

    def trace(self, tokens: Sequence[int], adapter: str | None) -> dict[str, Tensor]:
        return Reference(self.world.model).trace(tokens)


class ShowingRight(WithoutAdapters):
    """Its steps are wrong, a prompt is not."""

    def trace(self, tokens: Sequence[int], adapter: str | None) -> dict[str, Tensor]:
        # as it was before an exchange
        assert adapter is not None
        assert self.loaded[adapter].name == adapter
        return Reference(self.world.model, self.world.adapters[adapter]).trace(tokens)


class ShowingOthers(WithoutAdapters):
    def trace(self, tokens: Sequence[int], adapter: str | None) -> dict[str, Tensor]:
        return {"transformer.h.0": torch.zeros(1, 1)}


class Dying(WithoutAdapters):
    def trace(self, tokens: Sequence[int], adapter: str | None) -> dict[str, Tensor]:
        raise EngineError("its process ended with 7 in trace\nits log ends with: ...")


class Short(Speaking):
    def answer(self, request: Request) -> tuple[int, ...]:
        return super().answer(request)[:-1]


def evidence_of(world: World, kind: type[Speaking] = Speaking) -> Evidence:
    judge = Judge(world.model, world.adapters, dtype=world.dtype)
    return examined(kind(world), world, judge)


@pytest.fixture(scope="module")
def right(world: World) -> Evidence:
    """The evidence of an engine without a defect."""
    return evidence_of(world)


def with_answers(evidence: Evidence, **changes: Any) -> Evidence:
    return replace(evidence, answers=replace(evidence.answers, **changes))


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


def test_an_engine_without_a_defect_passes(
    world: World, right: Evidence, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = verdicts(monkeypatch, right)
    assert failing(found) == {}
    metrics = found[OracleName.TOKENS].metrics
    assert metrics["tokens"] == sum(asked.request.new_tokens for asked in world.batch)
    assert metrics["equal_texts"] == len(world.batch)
    assert 0 < metrics["noise"] <= 0.01


@pytest.mark.parametrize(
    ("kind", "wrong"),
    [
        (WithoutAdapters, {OracleName.TOKENS, OracleName.ENGINE_PROPERTIES}),
        (OfTheFirstRow, {OracleName.TOKENS, OracleName.ENGINE_PROPERTIES}),
        (WrongAlone, {OracleName.TOKENS, OracleName.ENGINE_PROPERTIES}),
        (Remembering, {OracleName.ENGINE_PROPERTIES}),
        (Dropping, {OracleName.ENGINE_PROPERTIES}),
        (Broken, {OracleName.TOKENS, OracleName.ENGINE_PROPERTIES}),
        (Idle, {OracleName.LIVENESS}),
        (Short, {OracleName.TOKENS}),
    ],
)
def test_an_engine_with_a_defect_fails_what_it_breaks(
    world: World, monkeypatch: pytest.MonkeyPatch, kind: type[Speaking], wrong: set[OracleName]
) -> None:
    found = verdicts(monkeypatch, evidence_of(world, kind))
    assert failing(found).keys() == wrong


def test_a_reload_that_breaks_all_adapters_alike_is_judged_by_the_reference(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    judgement = verdicts(monkeypatch, evidence_of(world, Broken))[OracleName.ENGINE_PROPERTIES]
    assert judgement.failure is Failure.STALE_STATE
    assert world.exchange is not None
    name = world.batch[world.last].request.adapter
    assert judgement.message.startswith(
        f"after {name} was loaded with the weights of {world.exchange.other}: "
    )
    assert judgement.message.endswith("said by base")
    assert judgement.metrics == {"problems": 2.0}


def test_only_what_happens_behind_the_start_is_counted(world: World, right: Evidence) -> None:
    assert right.answers.counts == EngineCounts(24, 16, 8, 72, WARM_UP.kernels_captured, 0, 0)
    nothing = EngineCounts(None, None, None, None)
    assert WARM_UP.since(nothing) == EngineCounts(None, None, None, None, 4, None, 0)
    foreign = EngineCounts(1, 1, 1, 1, 1, others_launched=5, others_captured=3)
    assert foreign.since(replace(foreign, others_launched=2)) == EngineCounts(
        0, 0, 0, 0, 1, others_launched=3, others_captured=3
    )


def test_counts_that_fall_are_no_counts_since_the_start(world: World) -> None:
    with pytest.raises(EngineBreach, match="counts returned drafts_accepted 3 after 5; expected "):
        evidence_of(world, CountingTheLastCall)


@pytest.mark.parametrize(
    ("counts", "verdict"),
    [
        # prompts are not replayed
        (EngineCounts(1, 1, 2, 1, 0), Verdict.PASS),
        (EngineCounts(1, 1, 2, 0, 4), Verdict.PASS),
        (EngineCounts(1, 1, 2, 0, 0), Verdict.FAIL),
        (EngineCounts(1, 1, 2, 0, None), Verdict.PASS),
    ],
)
def test_kernels_are_launched_by_calls_or_by_graphs_that_have_them(
    right: Evidence, monkeypatch: pytest.MonkeyPatch, counts: EngineCounts, verdict: Verdict
) -> None:
    case = replace(CASE, graphs=Graphs.FULL)
    found = verdicts(monkeypatch, with_answers(right, counts=counts), case)[OracleName.LIVENESS]
    assert found.verdict is verdict
    unknown = "the engine does not count kernels launched"
    assert (found.message == unknown) == (counts.kernels_captured is None)


def test_a_word_of_another_adapter_is_a_defect_that_names_it(
    world: World, right: Evidence, monkeypatch: pytest.MonkeyPatch
) -> None:
    number = next(n for n, a in enumerate(world.batch) if a.request.adapter is not None)
    asked = world.batch[number]
    other = next(s for s in world.speakers[1:] if s.name != asked.speaker.name)
    words = world.language.words_after(asked.prompt, other, asked.request.new_tokens)
    mixed = list(right.answers.mixed)
    mixed[number] = Completion(tuple(words))
    judge = Judge(world.model, world.adapters, dtype=world.dtype)
    report = judge.judge([a.request for a in world.batch], mixed)
    judgement = verdicts(monkeypatch, replace(right, report=report))[OracleName.TOKENS]
    assert judgement.failure is Failure.WRONG_ANSWER
    assert f"said by {other.name}" in judgement.message
    place = {"request": number, "adapter": asked.request.adapter, "token": 0}
    assert dict(judgement.where) == place
    # wider than what a finding may list as arithmetic
    assert judgement.metrics["error"] > 6 > judgement.metrics["allowed"]


def test_tokens_that_are_missing_have_no_error_that_a_finding_could_list(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    judgement = verdicts(monkeypatch, evidence_of(world, Short))[OracleName.TOKENS]
    assert dict(judgement.metrics) == {"defects": float(len(world.batch))}
    assert "is missing" in judgement.message


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Showing, "the first module that leaves the reference is layer 0: self_attn.q_proj, at "),
        (ShowingRight, "as one prompt the same tokens are right in all "),
        (ShowingOthers, "there is no bisection: the model has no module 'transformer.h.0'"),
        (Dying, "there is no bisection: its process ended with 7 in trace"),
        (WithoutAdapters, "there is no bisection: the engine shows none of its modules"),
    ],
)
def test_a_defect_is_bisected_as_far_as_the_engine_shows_its_modules(
    world: World, monkeypatch: pytest.MonkeyPatch, kind: type[Speaking], message: str
) -> None:
    found = verdicts(monkeypatch, evidence_of(world, kind))[OracleName.TOKENS]
    assert found.failure is Failure.WRONG_ANSWER
    assert found.message.splitlines()[-1].startswith(message)


def test_too_many_near_ties_are_inconclusive(
    right: Evidence, monkeypatch: pytest.MonkeyPatch
) -> None:
    tied = replace(right, report=replace(right.report, near_ties=1))
    judgement = verdicts(monkeypatch, tied)[OracleName.TOKENS]
    assert judgement.verdict is Verdict.INCONCLUSIVE
    assert judgement.message == f"1 of {right.report.tokens} tokens are near ties, more than 1%"


def test_each_property_that_is_broken_fails(
    world: World, right: Evidence, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers, odd = right.answers, Completion((0, 0, 0, 0))
    shared = [n for n, a in enumerate(world.batch) if n != world.last]
    base = next(n for n in shared if world.batch[n].request.adapter is None)
    as_base = tuple(answers.mixed[base] if n in shared else c for n, c in enumerate(answers.mixed))
    stale = Exchange(answers.alone, odd)
    for changed, failure, message in (
        (
            {"mixed": as_base, "permuted": as_base},
            Failure.WRONG_ANSWER,
            "answers as the base model",
        ),
        (
            {"permuted": (odd, *answers.permuted[1:])},
            Failure.NOT_EQUIVARIANT,
            "request 0 is answered 0 0 0 0 in another place",
        ),
        ({"alone": odd}, Failure.BATCH_DEPENDENT, "is answered 0 0 0 0 alone"),
        ({"exchange": stale}, Failure.STALE_STATE, "answers as before, "),
    ):
        found = verdicts(monkeypatch, with_answers(right, **changed))
        assert failing(found) == {OracleName.ENGINE_PROPERTIES: failure}
        assert message in found[OracleName.ENGINE_PROPERTIES].message
    found = verdicts(monkeypatch, with_answers(right, alone=odd, exchange=stale))
    # a listed finding of one property does not excuse another one
    judgement = found[OracleName.ENGINE_PROPERTIES]
    assert judgement.metrics == {"problems": 2.0}
    assert judgement.where == {"property": ALONE}


def test_an_exchange_of_weights_that_answer_the_same_decides_nothing(
    right: Evidence, monkeypatch: pytest.MonkeyPatch
) -> None:
    same = with_answers(right, exchange=Exchange(right.answers.alone, right.answers.alone))
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
    right: Evidence,
    monkeypatch: pytest.MonkeyPatch,
    axes: dict[str, Any],
    counts: EngineCounts,
    idle: str,
) -> None:
    evidence = with_answers(right, counts=counts)
    found = verdicts(monkeypatch, evidence, replace(CASE, **axes))
    assert failing(found) == {OracleName.LIVENESS: Failure.IDLE}
    assert found[OracleName.LIVENESS].message.endswith(f"asks for them: {idle}")


def test_what_nobody_counts_or_asks_for_is_not_judged(
    right: Evidence, monkeypatch: pytest.MonkeyPatch
) -> None:
    nothing = with_answers(right, counts=EngineCounts(None, None, None, None))
    found = verdicts(monkeypatch, nothing)[OracleName.LIVENESS]
    assert found.verdict is Verdict.SKIP
    assert "does not count drafts accepted, drafts rejected" in found.message
    idle = with_answers(right, counts=EngineCounts(0, 0, 0, 0))
    plain = replace(CASE, speculation=Speculation.NONE, active=Active.NONE)
    assert verdicts(monkeypatch, idle, plain)[OracleName.LIVENESS].verdict is Verdict.SKIP


def test_counts_that_pass_name_the_ones_that_nobody_knows(
    right: Evidence, monkeypatch: pytest.MonkeyPatch
) -> None:
    some = with_answers(right, counts=EngineCounts(3, 2, None, None))
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


def test_of_an_engine_that_raises_the_stack_is_that_of_its_own_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    raised = "generate raised KeyError: 'a'\nits log ends with:\n  File \"engine.py\", line 3, in f"
    found = verdicts(monkeypatch, EngineError(raised))
    assert {judgement.message for judgement in found.values()} == {raised}


def test_an_engine_that_breaks_the_protocol_is_told_so_in_one_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = verdicts(monkeypatch, EngineBreach("counts returned a dict"))
    assert {(j.verdict, j.failure, j.message) for j in found.values()} == {
        (Verdict.FAIL, Failure.BROKEN_PROTOCOL, "counts returned a dict")
    }


def test_a_repeat_of_a_trial_runs_the_engine_again_and_its_oracles_share_a_run(
    right: Evidence, monkeypatch: pytest.MonkeyPatch
) -> None:
    collected: list[Path] = []

    def collect(target: str, *given: object) -> Evidence:
        collected.append(Path(target))
        return right

    monkeypatch.setattr(session, "collect", collect)
    # a process keeps its subject
    subject = CheckedSubject(TransformersSubject())
    have = subject.capabilities(CPU)
    assert not isinstance(have, str)
    for _ in range(2):
        run_trial(Trial(CASE, subject, have, CPU, seed=3))
    assert len(collected) == 2


def test_no_oracle_of_engines_judges_tensors_or_what_has_no_checkpoint() -> None:
    subject = TransformersSubject()
    have = subject.capabilities(CPU)
    assert not isinstance(have, str)
    dense = Case(site=Site.DENSE_DELTA, rank=8, slots=2, dtype=Dtype.FP32)
    for case, reason in (
        (dense, "judges engines"),
        (replace(CASE, speculation=Speculation.MTP), "without layers for speculation mtp"),
    ):
        trial = Trial(case, CheckedSubject(subject), have, CPU, seed=3)
        for name in ENGINE_ORACLES:
            assert reason in str(ORACLES[name].applies(trial))
