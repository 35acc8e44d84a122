"""What an engine did in a case: the answers to the same requests in several ways, its counts, and
what the judge says of its tokens.

They are collected once, in one process of the engine, and judged by several oracles.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from torch import Tensor

from loragate.core.machine import Machine
from loragate.engine.judge import Judge
from loragate.engine.logprobs import distance
from loragate.engine.order import EngineOrder
from loragate.engine.process import EngineBreach, EngineError, EngineProcess
from loragate.engine.report import Report
from loragate.engine.requests import Completion, Engine, EngineCounts, Request
from loragate.engine.world import World, build_world
from loragate.matrix.case import Case
from loragate.matrix.engine_case import Requests, Speculation

# when requests were asked again, and the answers to the whole batch
Round = tuple[str, tuple[Completion, ...]]
# of the deadline of a case: what is left is for writing the checkpoint and for the judge
_SHARE = 0.8


@dataclass(frozen=True, slots=True)
class Exchange:
    """Answers to the last request of the world, whose adapter was loaded again with the weights of
    another one: of both adapters, afterwards."""

    again: Completion
    other: Completion


@dataclass(frozen=True, slots=True)
class Answers:
    """mixed: to the batch of the world. permuted: to the same requests in another order, put back
    in theirs. alone: to the last request, in a batch of its own. later: to the batch, by what
    happened before; requests that were not asked then have the answers of `mixed`. counts: of these
    calls, without the start of the engine, whose warm-up launches kernels and replays graphs as
    well."""

    mixed: tuple[Completion, ...]
    permuted: tuple[Completion, ...]
    alone: Completion
    exchange: Exchange | None
    counts: EngineCounts
    later: Mapping[str, tuple[Completion, ...]] = field(default_factory=dict)

    def rounds(self, last: int) -> dict[str, tuple[Completion, ...]]:
        """All answers that the weights of the world must give, each time to the whole batch, by
        when they were given; "" for the first time. last: the request that was asked alone."""
        alone = (*self.mixed[:last], self.alone, *self.mixed[last + 1 :])
        return {
            "": self.mixed,
            "in another order of the batch": self.permuted,
            "alone": alone,
            **self.later,
        }


@dataclass(frozen=True, slots=True)
class Evidence:
    """report: what the judge says of the first of `answers.rounds` that has a defect, which is
    `when`, or of `answers.mixed`. reloaded: of `answers.exchange`, where there is one and
    `answers.mixed` has no defect. bisection: where the first defect of `report` begins, as far as
    the engine shows it; "" without a defect."""

    world: World
    answers: Answers
    report: Report
    reloaded: Report | None = None
    bisection: str = ""
    when: str = ""

    @property
    def judged(self) -> tuple[Completion, ...]:
        """The answers that `report` is about."""
        return self.answers.rounds(self.world.last)[self.when]


def collect(target: str, case: Case, machine: Machine, seed: int) -> Evidence:
    """Run an engine through a case. Raises EngineError."""
    with tempfile.TemporaryDirectory(prefix="loragate-engine-") as path:
        world = build_world(case, seed, Path(path))
        order = EngineOrder(
            case=case,
            model=world.model,
            drafts=world.drafts,
            device=machine.device,
            max_length=world.max_length,
            max_requests=_most_at_a_time(case, len(world.batch)),
            num_adapters=len(world.adapters),
        )
        log = Path(path, "engine.log")
        # a head of EAGLE is no model of its own that could be asked what it drafts
        drafts = world.drafts if case.speculation is Speculation.DRAFT_MODEL else None
        judge = Judge(world.model, world.adapters, dtype=world.dtype, draft=drafts)
        with EngineProcess(target, order, deadline_s=_SHARE * case.timeout_s, log=log) as engine:
            return examined(engine, world, judge)


def _most_at_a_time(case: Case, requests: int) -> int:
    return max(1, requests // 2) if case.requests is Requests.QUEUED else requests


def examined(engine: Engine, world: World, judge: Judge) -> Evidence:
    """Ask an engine, and judge its answers while it can be asked for what lies behind a defect."""
    answers = ask(engine, world)
    requests = [asked.request for asked in world.batch]
    report = judge.judge(requests, answers.mixed)
    reloaded = None if report.problems else _judged_reload(world, answers, judge)
    for when, completions in answers.rounds(world.last).items():
        # the same answers once more say nothing new
        is_known = _all_said(completions) == _all_said(answers.mixed)
        again = report if is_known else judge.judge(requests, completions)
        if again.problems:
            number = again.problems[0].request
            found = _bisected(engine, world, judge, requests[number], completions[number])
            return Evidence(world, answers, again, reloaded, bisection=found, when=when)
    return Evidence(world, answers, report, reloaded)


def _all_said(completions: Sequence[Completion]) -> list[object]:
    return [(completion.tokens, completion.logprobs) for completion in completions]


def _judged_reload(world: World, answers: Answers, judge: Judge) -> Report | None:
    """Both answers are those of the weights of the other adapter."""
    if world.exchange is None or answers.exchange is None:
        return None
    of_other = replace(world.batch[world.last].request, adapter=world.exchange.other)
    return judge.judge([of_other, of_other], [answers.exchange.again, answers.exchange.other])


def ask(engine: Engine, world: World) -> Answers:
    """Load the adapters of a world, and collect answers to its requests."""
    for name, folder in world.adapters.items():
        engine.load(name, folder)
    before = engine.counts()
    requests = [asked.request for asked in world.batch]
    mixed = engine.generate(requests)
    # a place of another request for each
    order = [*range(1, len(requests)), 0]
    permuted = engine.generate([requests[index] for index in order])
    later = dict(_of_base_rows_alone(engine, world, mixed))
    (alone,) = engine.generate([requests[world.last]])
    # where there are more adapters than slots, what is exchanged is not resident
    if world.is_crowded:
        later |= dict(_while_others_are_used(engine, world, mixed))
    exchange = _exchanged(engine, world)
    later |= dict(_with_own_weights_again(engine, world, mixed))
    after = engine.counts()
    if fallen := after.fallen(before):
        expected = "what was done since the start, which never falls"
        raise EngineBreach(f"counts returned {fallen}; expected {expected}")
    return Answers(
        mixed=tuple(mixed),
        permuted=tuple(permuted[order.index(index)] for index in range(len(requests))),
        alone=alone,
        exchange=exchange,
        counts=after.since(before),
        later=later,
    )


def _of_base_rows_alone(
    engine: Engine, world: World, mixed: Sequence[Completion]
) -> Iterator[Round]:
    """The request of the base model as often as the batch has requests, between batches with
    adapters: no row may have one of the batch before, and that of the next batch must be there
    again."""
    if world.exchange is None:
        return
    number = next(n for n, asked in enumerate(world.batch) if asked.request.adapter is None)
    answers = engine.generate([world.batch[number].request] * len(mixed))
    # one answer is right for all: the one that is furthest from it is judged
    furthest = max(answers, key=lambda answer: distance(answer, mixed[number]))
    yield "in a batch of base rows alone", (*mixed[:number], furthest, *mixed[number + 1 :])


def _while_others_are_used(
    engine: Engine, world: World, mixed: Sequence[Completion]
) -> Iterator[Round]:
    last = world.batch[world.last].request.adapter
    when = f"while all adapters but {last} were used"
    yield when, _asked_some(engine, world, _of_others(world), mixed)


def _with_own_weights_again(
    engine: Engine, world: World, mixed: Sequence[Completion]
) -> Iterator[Round]:
    """The adapter of the last request is unloaded as it was exchanged, but where there are more
    adapters than slots, and loaded as it was before; then another one is loaded over itself.
    Nobody else may notice, wherever they are put."""
    last = world.batch[world.last].request.adapter
    if last is None or world.exchange is None:
        return
    when = f"after {last} was loaded again with its own weights"
    if not world.is_crowded:
        engine.unload(last)
        yield f"while {last} was unloaded", _asked_some(engine, world, _of_others(world), mixed)
        when = f"after {last} was unloaded and loaded again"
    engine.load(last, world.adapters[last])
    yield when, _asked_some(engine, world, range(len(mixed)), mixed)
    other = world.exchange.other
    engine.load(other, world.adapters[other])
    yield f"after {other} was loaded again", _asked_some(engine, world, [world.last], mixed)


def _of_others(world: World) -> list[int]:
    """The requests of all but the adapter of the last one."""
    last = world.batch[world.last].request.adapter
    return [n for n, asked in enumerate(world.batch) if asked.request.adapter != last]


def _asked_some(
    engine: Engine, world: World, numbers: Sequence[int], mixed: Sequence[Completion]
) -> tuple[Completion, ...]:
    """The answers of a batch, of which these requests are asked again, together."""
    answers = engine.generate([world.batch[number].request for number in numbers])
    known = dict(enumerate(mixed)) | dict(zip(numbers, answers, strict=True))
    return tuple(known[number] for number in range(len(mixed)))


def _exchanged(engine: Engine, world: World) -> Exchange | None:
    if world.exchange is None:
        return None
    request = world.batch[world.last].request
    assert request.adapter is not None, "the last request has an adapter where there is an exchange"
    engine.load(request.adapter, world.exchange.folder)
    of_other = replace(request, adapter=world.exchange.other)
    again, other = engine.generate([request, of_other])
    return Exchange(again, other)


def _bisected(
    engine: Engine, world: World, judge: Judge, request: Request, answer: Completion
) -> str:
    """Of the prompt and the answer as one prompt, with the adapter that the request was served by.
    The defect stands whatever becomes of this."""
    shown: dict[str, Tensor] = {}

    def trace(tokens: Sequence[int], adapter: str | None) -> dict[str, Tensor]:
        shown.update(engine.trace(tokens, adapter))
        return shown

    try:
        if request.adapter is not None:
            # it may have been exchanged since
            engine.load(request.adapter, world.adapters[request.adapter])
        found = judge.bisect(request, answer, trace)
    except (EngineError, ValueError) as error:
        return f"there is no bisection: {str(error).splitlines()[0]}"
    if not shown:
        return "there is no bisection: the engine shows none of its modules"
    if found is None:
        return f"as one prompt the same tokens are right in all {len(shown)} modules that are shown"
    return str(found)
