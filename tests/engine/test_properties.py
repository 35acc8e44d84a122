"""Properties of any engine: each holds for one that is right, and fails for one that breaks it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from loragate.core.sequential import Decision
from loragate.engine.language import Language, draw_prompt, draw_speakers
from loragate.engine.properties import (
    Property,
    a_permuted_batch_permutes,
    adapters_differ_from_base,
    alone_equals_mixed,
    liveness,
    reload_serves_the_new_weights,
)
from loragate.engine.requests import Completion, EngineCounts, Request

LANGUAGE = Language(cycles=4)
SPEAKERS = draw_speakers(LANGUAGE, 3, Random(5))
FOLDERS = {Path(speaker.name): speaker for speaker in SPEAKERS}
OLD, SECOND, NEW = FOLDERS
PROMPTS = {
    tuple(LANGUAGE.tokens(prompt)): prompt
    for prompt in (
        draw_prompt(LANGUAGE, [LANGUAGE.base(), *SPEAKERS], random)
        for random in map(Random, range(6))
    )
}
REQUESTS = [
    Request(prompt, name, 4)
    for prompt, name in zip(PROMPTS, (None, OLD.name, SECOND.name) * 2, strict=True)
]


class Speaking:
    """An engine that speaks the language by itself."""

    def __init__(self) -> None:
        self.loaded = {OLD.name: FOLDERS[OLD], SECOND.name: FOLDERS[SECOND]}

    def load(self, name: str, folder: Path) -> None:
        self.loaded[name] = FOLDERS[folder]

    def unload(self, name: str) -> None:
        del self.loaded[name]

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        return [Completion(self.answer(request)) for request in requests]

    def answer(self, request: Request) -> tuple[int, ...]:
        name = request.adapter
        speaker = LANGUAGE.base() if name is None else self.loaded[name]
        return tuple(LANGUAGE.words_after(PROMPTS[request.prompt], speaker, request.new_tokens))

    def counts(self) -> EngineCounts:
        return EngineCounts(None, None, None, None)

    def close(self) -> None:
        self.loaded.clear()


class WithoutAdapters(Speaking):
    def answer(self, request: Request) -> tuple[int, ...]:
        return super().answer(replace(request, adapter=None))


class OfTheFirstRow(Speaking):
    """Serves a batch with the adapter of its first request."""

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        return super().generate([replace(r, adapter=requests[0].adapter) for r in requests])


class OfPlaces(Speaking):
    """Serves the last place with the adapter of the place before, if there is one."""

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        last = replace(requests[-1], adapter=requests[-2:][0].adapter)
        return super().generate([*requests[:-1], last])


class Remembering(Speaking):
    """Answers what it has answered to the same prompt under the same name."""

    def __init__(self) -> None:
        super().__init__()
        self.cache: dict[Request, tuple[int, ...]] = {}

    def answer(self, request: Request) -> tuple[int, ...]:
        return self.cache.setdefault(request, super().answer(request))


class Dropping(Speaking):
    """Serves the base model under a name that was taken when it was loaded."""

    def load(self, name: str, folder: Path) -> None:
        known = name in self.loaded
        super().load(name, folder)
        if known:
            self.loaded[name] = LANGUAGE.base()


def properties(engine: Speaking) -> list[Property]:
    return [
        adapters_differ_from_base(engine.generate, REQUESTS),
        a_permuted_batch_permutes(engine.generate, REQUESTS, (4, 0, 5, 1, 3, 2)),
        alone_equals_mixed(engine.generate, REQUESTS),
        reload_serves_the_new_weights(engine, "new", (OLD, NEW), REQUESTS),
    ]


def test_all_properties_hold_for_an_engine_that_is_right() -> None:
    right = Speaking()
    assert {found.decision for found in properties(right)} == {Decision.PASS}
    # what was loaded for a check is gone
    assert set(right.loaded) == {OLD.name, SECOND.name}


@pytest.mark.parametrize(
    ("kind", "name", "detail"),
    [
        (WithoutAdapters, "adapters differ", "request 0 has the answer of the base model with"),
        (OfTheFirstRow, "a permuted batch", "request 4 has another answer at place 0"),
        (OfPlaces, "a request alone", "request 5 has another answer alone than in the batch"),
        (Remembering, "a reload serves", "request 0 has the answer of the old weights"),
        (Dropping, "a reload serves", "request 0 has the answer of neither weights"),
    ],
)
def test_an_engine_that_breaks_a_property_fails_it(
    kind: type[Speaking], name: str, detail: str
) -> None:
    (found,) = [found for found in properties(kind()) if found.name.startswith(name)]
    assert found.decision is Decision.FAIL
    assert found.detail.startswith(detail)


def test_a_reload_of_the_same_weights_shows_nothing() -> None:
    found = reload_serves_the_new_weights(Speaking(), "new", (OLD, OLD), REQUESTS)
    assert found.decision is Decision.UNDECIDED


@pytest.mark.parametrize(
    ("counts", "decision", "detail"),
    [
        (EngineCounts(5, 1, None, None), Decision.PASS, ""),
        (EngineCounts(5, 0, None, None), Decision.FAIL, "drafts_rejected is 0"),
        (EngineCounts(0, None, None, None), Decision.FAIL, "drafts_accepted is 0"),
        (EngineCounts(5, None, 0, 0), Decision.UNDECIDED, "does not say drafts_rejected"),
    ],
)
def test_what_takes_part_has_a_count(counts: EngineCounts, decision: Decision, detail: str) -> None:
    found = liveness(counts, wanted=["drafts_accepted", "drafts_rejected"])
    assert found.decision is decision
    assert found.detail.endswith(detail)


def test_what_cannot_be_checked_is_refused() -> None:
    with pytest.raises(ValueError, match=r"there is no count 'drafts'; known are drafts_accepted"):
        liveness(EngineCounts(1, 1, 1, 1), wanted=["drafts"])
    with pytest.raises(ValueError, match=r"order must be a permutation of 6"):
        a_permuted_batch_permutes(Speaking().generate, REQUESTS, (0, 0, 1, 2, 3, 4))
    with pytest.raises(ValueError, match=r"completions must be 6 \(got 5\)"):
        alone_equals_mixed(lambda requests: Speaking().generate(requests[:5]), REQUESTS)
