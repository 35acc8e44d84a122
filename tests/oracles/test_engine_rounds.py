"""Requests that are asked again, after something has happened to adapters, are judged as well."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from loragate.core.sequential import Decision
from loragate.core.verdict import Verdict
from loragate.engine.evidence import Evidence, examined
from loragate.engine.judge import Judge
from loragate.engine.language import Prompt, Speaker
from loragate.engine.reference import Reference
from loragate.engine.report import Report
from loragate.engine.requests import Completion, Request
from loragate.engine.world import World, build_world
from loragate.matrix.case import Case, Dtype, Site
from loragate.matrix.engine_case import Active, Ends, Weights
from loragate.oracles.engine.properties import _judged as judged_properties
from loragate.oracles.engine.tokens import _judged as judged_tokens

from .speaking_engine import Speaking

CASE = Case(site=Site.ENGINE, rank=8, slots=2, dtype=Dtype.FP32)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return build_world(CASE, 5, tmp_path_factory.mktemp("world"))


@pytest.fixture(scope="module")
def crowded(tmp_path_factory: pytest.TempPathFactory) -> World:
    case = replace(CASE, active=Active.BEYOND_SLOTS)
    return build_world(case, 5, tmp_path_factory.mktemp("crowded"))


@pytest.fixture(scope="module")
def ending(tmp_path_factory: pytest.TempPathFactory) -> World:
    return build_world(replace(CASE, ends=Ends.STOP), 5, tmp_path_factory.mktemp("ending"))


class Stepping(Speaking):
    """Says a word of each request in a step. The last row moves to the place of one that ends."""

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        self.calls += 1
        answers: list[list[int]] = [[] for _ in requests]
        live, rows = [*range(len(requests))], [request.adapter for request in requests]
        while live:
            for number, adapter in zip(live, rows, strict=False):
                request, answer = requests[number], answers[number]
                words = self.language.words_after(
                    self.said(request, answer), self.loaded[adapter], 1
                )
                answer += words
            for row in reversed(range(len(live))):
                request, answer = requests[live[row]], answers[live[row]]
                if self.is_over(request, answer):
                    live[row] = live[-1]
                    live.pop()
                    self.move(rows, row, len(live))
        return [Completion(tuple(answer)) for answer in answers]

    def said(self, request: Request, answer: Sequence[int]) -> Prompt:
        """As a prompt, which goes on with the last word."""
        prompt = self.prompts[request.prompt]
        return replace(prompt, word=answer[-1]) if answer else prompt

    def is_over(self, request: Request, answer: Sequence[int]) -> bool:
        return len(answer) == request.wanted(answer)

    def move(self, rows: list[str | None], row: int, last: int) -> None:
        rows[row] = rows[last]


class LeavingAdapters(Stepping):
    """Whoever moves to another row has the adapter of the request that was there."""

    def move(self, rows: list[str | None], row: int, last: int) -> None:
        pass


class GoingOn(Stepping):
    def is_over(self, request: Request, answer: Sequence[int]) -> bool:
        return len(answer) == request.new_tokens


class EndingAWordLate(Stepping):
    """Notices the end of an answer in the step behind it."""

    def is_over(self, request: Request, answer: Sequence[int]) -> bool:
        return len(answer) == min(request.new_tokens, request.wanted(answer) + 1)


class EndingWithoutIt(Stepping):
    """Leaves out the token that ends an answer."""

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        found = zip(requests, super().generate(requests), strict=True)
        return [
            Completion(answer.tokens[:-1])
            if answer.tokens[-1] in request.stop and len(answer.tokens) > 1
            else answer
            for request, answer in found
        ]


class ClearingAnother(Speaking):
    """Clears the slot of another adapter than the one that is unloaded."""

    def unload(self, name: str) -> None:
        other = next(known for known in self.loaded if known not in (None, name))
        self.loaded[other] = self.language.base()
        super().unload(name)


class LoadedEmpty(Speaking):
    """Has no weights for a name that was unloaded once."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.unloaded: set[str] = set()

    def unload(self, name: str) -> None:
        self.unloaded.add(name)
        super().unload(name)

    def load(self, name: str, folder: Path) -> None:
        super().load(name, folder)
        if name in self.unloaded:
            self.loaded[name] = self.language.base()


class WrongInTheSecondBatch(Speaking):
    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        found = super().generate(requests)
        if self.calls == 2:
            found = super().generate([replace(request, adapter=None) for request in requests])
        return found


class WrongAlone(Speaking):
    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        if len(requests) == 1:
            requests = [replace(requests[0], adapter=None)]
        return super().generate(requests)


class KeepingRows(Speaking):
    """Does not look at a batch without an adapter: its rows have those of the one before."""

    rows: Sequence[str | None] = ()

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        own = [request.adapter for request in requests]
        self.rows = own if any(own) else self.rows
        served = zip(requests, self.rows, strict=False)
        return super().generate([replace(request, adapter=row) for request, row in served])


class KeepingTheFirst(Speaking):
    """A batch without adapters keeps one of the batch before: that of its first row with one."""

    first: tuple[int, str | None] = (0, None)

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        own = [(row, r.adapter) for row, r in enumerate(requests) if r.adapter is not None]
        if own:
            self.first = self.chosen(own)
        elif self.first[0] < len(requests):
            row, adapter = self.first
            requests = list(requests)
            requests[row] = replace(requests[row], adapter=adapter)
        return super().generate(requests)

    def chosen(self, own: Sequence[tuple[int, str | None]]) -> tuple[int, str | None]:
        return own[0]


class KeepingTheLast(KeepingTheFirst):
    def chosen(self, own: Sequence[tuple[int, str | None]]) -> tuple[int, str | None]:
        return own[-1]


class StartingLate(Speaking):
    """Notices that there are adapters again when the first batch that has some is over."""

    is_on = True

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        was_on, self.is_on = self.is_on, any(request.adapter for request in requests)
        if not was_on:
            requests = [replace(request, adapter=None) for request in requests]
        return super().generate(requests)


class Numbered(Speaking):
    """Has slots. A name that is loaded gets the one behind as many as there are names."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.slots: dict[str, int] = {}
        self.weights: dict[int, Speaker] = {}

    def load(self, name: str, folder: Path) -> None:
        self.slots.setdefault(name, len(self.slots))
        self.weights[self.slots[name]] = self.folders[folder]

    def unload(self, name: str) -> None:
        del self.slots[name]

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        self.loaded |= {name: self.weights[slot] for name, slot in self.slots.items()}
        return super().generate(requests)


class KeptOverUnloading(Speaking):
    """Forgets what it has answered when a name is loaded again, but not when it is unloaded."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.kept: dict[Request, tuple[int, ...]] = {}

    def load(self, name: str, folder: Path) -> None:
        if name in self.loaded:
            self.kept.clear()
        super().load(name, folder)

    def answer(self, request: Request) -> tuple[int, ...]:
        return self.kept.setdefault(request, super().answer(request))


class MergingAReload(Speaking):
    """Leaves the new weights of a name that was taken in the base model."""

    def load(self, name: str, folder: Path) -> None:
        again = name in self.loaded
        super().load(name, folder)
        if again:
            self.loaded[None] = self.loaded[name]


class ReloadingAll(Speaking):
    """Gives the new weights of a name that was taken to all others, too."""

    def load(self, name: str, folder: Path) -> None:
        again = name in self.loaded
        super().load(name, folder)
        if again:
            self.loaded |= {known: self.loaded[name] for known in self.loaded if known}


class KeepingTheUnused(Speaking):
    """Ignores new weights for an adapter that the last batch did not use."""

    used: frozenset[str | None] = frozenset()

    def load(self, name: str, folder: Path) -> None:
        if name in self.used or name not in self.loaded:
            super().load(name, folder)

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        self.used = frozenset(request.adapter for request in requests)
        return super().generate(requests)


def judge_of(world: World) -> Judge:
    return Judge(world.model, world.adapters, dtype=world.dtype)


def evidence_of(world: World, kind: type[Speaking]) -> Evidence:
    return examined(kind(world), world, judge_of(world))


@pytest.mark.parametrize(
    ("kind", "when"),
    [
        (WrongInTheSecondBatch, "in another order of the batch: "),
        (KeepingRows, "in a batch of base rows alone: "),
        (KeepingTheFirst, "in a batch of base rows alone: "),
        (KeepingTheLast, "in a batch of base rows alone: "),
        (StartingLate, "alone: "),
        (WrongAlone, "alone: "),
        (ClearingAnother, "while {} was unloaded: "),
        (LoadedEmpty, "after {} was unloaded and loaded again: "),
        (Numbered, "after {} was unloaded and loaded again: "),
        (KeptOverUnloading, "after {} was unloaded and loaded again: "),
        (MergingAReload, "while {} was unloaded: "),
        # what was exchanged has the weights of the only other one
        (ReloadingAll, "after adapter-1 was loaded again: "),
    ],
)
def test_a_wrong_token_of_any_round_is_a_defect_that_says_when(
    world: World, kind: type[Speaking], when: str
) -> None:
    judgement = judged_tokens(evidence_of(world, kind))
    name = world.batch[world.last].request.adapter
    assert judgement.message.startswith(when.format(name) + "request ")


def test_an_engine_whose_batches_shrink_is_right_and_its_answers_have_their_lengths(
    ending: World,
) -> None:
    found = evidence_of(ending, Stepping)
    assert judged_tokens(found).verdict is judged_properties(found).verdict is Verdict.PASS
    lengths = [len(answer.tokens) for answer in found.answers.mixed]
    assert min(lengths) == 1
    assert len(set(lengths)) > 2
    assert found.report.matches == len(lengths)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (LeavingAdapters, ", said by "),
        # right tokens, but too many of them
        (GoingOn, ", behind the end of the answer; "),
        (EndingAWordLate, ", behind the end of the answer; "),
        (EndingWithoutIt, " is missing"),
    ],
)
def test_rows_that_move_and_ends_that_are_missed_show_in_the_tokens_of_a_batch_that_shrinks(
    ending: World, kind: type[Stepping], message: str
) -> None:
    judgement = judged_tokens(evidence_of(ending, kind))
    assert judgement.verdict is Verdict.FAIL
    assert message in judgement.message


def test_tokens_behind_the_end_of_some_answers_have_no_error_that_a_finding_could_list(
    ending: World,
) -> None:
    found = evidence_of(ending, GoingOn)
    assert 0 < len(found.report.defects) < len(ending.batch)
    assert dict(judged_tokens(found).metrics) == {"defects": float(len(found.report.defects))}


class WithLogprobs(Speaking):
    """Says the probabilities of the reference, but of one call those without an adapter."""

    wrong_call = 0

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        found = super().generate(requests)
        return [self.told(*one) for one in zip(requests, found, strict=True)]

    def told(self, request: Request, answer: Completion) -> Completion:
        speaker = self.loaded[None if self.calls == self.wrong_call else request.adapter]
        folder = next((own for own, known in self.folders.items() if known is speaker), None)
        judged = Reference(self.world.model, folder).judge(request.prompt, answer.tokens)
        return replace(answer, logprobs=tuple(token.logprob for token in judged))


@pytest.mark.parametrize(
    ("wrong_call", "when"),
    [(0, None), (1, ""), (2, "in another order of the batch"), (4, "alone")],
)
def test_a_wrong_probability_of_a_right_token_is_found_in_any_round(
    world: World, wrong_call: int, when: str | None
) -> None:
    engine = WithLogprobs(world)
    engine.wrong_call = wrong_call
    found = examined(engine, world, Judge(world.model, world.adapters, dtype=world.dtype))
    judgement = judged_tokens(found)
    if when is None:
        assert judgement.verdict is Verdict.PASS
        return
    assert (judgement.verdict, found.when) == (Verdict.FAIL, when)
    assert judgement.metrics["wrong_logprobs"] >= 1
    assert judgement.metrics["logprob_error"] > 0.1
    assert judgement.where["token"] == 0
    assert "has the log-probability" in judgement.message
    assert judgement.message.startswith(f"{when}: request" if when else "request")
    # texts are the same, whatever their probabilities are
    assert judged_properties(found).verdict is Verdict.PASS


@pytest.mark.parametrize("errors", [(20.0, 30.0), (30.0, 20.0)])
def test_the_error_of_wrong_probabilities_is_the_largest_of_all_requests(
    world: World, errors: tuple[float, float]
) -> None:
    found = evidence_of(world, Speaking)
    requests, answers = [asked.request for asked in world.batch], list(found.judged)
    for number, error in enumerate(errors):
        request, tokens = requests[number], answers[number].tokens
        own = Reference(world.model, world.adapters.get(str(request.adapter)))
        first, *others = [token.logprob for token in own.judge(request.prompt, tokens)]
        answers[number] = Completion(tokens, (first - error, *others))
    report = judge_of(world).judge(requests, answers)
    judgement = judged_tokens(replace(found, report=report))
    assert judgement.verdict is Verdict.FAIL
    assert judgement.metrics["wrong_logprobs"] == 2
    assert judgement.metrics["logprob_error"] == pytest.approx(30.0)
    assert judgement.where["request"] == 0


def test_a_request_that_was_not_asked_again_is_not_what_is_wrong(world: World) -> None:
    found = evidence_of(world, ClearingAnother)
    wrong = {world.batch[defect.request].request.adapter for defect in found.report.defects}
    assert wrong
    assert world.batch[world.last].request.adapter not in wrong


def test_an_adapter_that_was_evicted_must_take_new_weights_when_it_is_loaded(
    world: World, crowded: World
) -> None:
    """Where there are more adapters than slots all others are used before the exchange."""
    assert (world.is_crowded, crowded.is_crowded) == (False, True)
    kept, lost = (evidence_of(one, KeepingTheUnused) for one in (world, crowded))
    assert kept.report.decision is lost.report.decision is Decision.PASS
    assert judged_properties(kept).message == ""
    name = crowded.batch[crowded.last].request.adapter
    assert judged_properties(lost).message.startswith(f"{name} with the weights of ")
    assert "answers as before" in judged_properties(lost).message


def test_of_more_adapters_than_slots_none_may_notice_that_another_one_is_loaded_again(
    crowded: World,
) -> None:
    name = crowded.batch[crowded.last].request.adapter
    for kind in (MergingAReload, ReloadingAll):
        found = evidence_of(crowded, kind)
        assert found.when == f"after {name} was loaded again with its own weights"
        assert judged_tokens(found).verdict is Verdict.FAIL
        assert judged_properties(found).verdict is Verdict.PASS


class WithoutAdapters(Speaking):
    def answer(self, request: Request) -> tuple[int, ...]:
        return super().answer(replace(request, adapter=None))


def test_with_random_weights_adapters_need_not_differ_in_their_first_token(world: World) -> None:
    found = evidence_of(world, WithoutAdapters)
    assert "answers as the base model" in judged_properties(found).message
    random = replace(found, world=replace(world, weights=Weights.RANDOM))
    assert "answers as the base model" not in judged_properties(random).message


def test_answers_that_are_the_same_again_are_judged_once(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    judge, calls = judge_of(world), list[int]()
    judged: Callable[..., Report] = judge.judge

    def counted(requests: Sequence[Request], completions: Sequence[Completion]) -> Report:
        calls.append(len(requests))
        return judged(requests, completions)

    monkeypatch.setattr(judge, "judge", counted)
    assert examined(Speaking(world), world, judge).report.decision is Decision.PASS
    # the batch, and the two answers behind a reload
    assert calls == [len(world.batch), 2]
