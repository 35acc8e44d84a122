"""Properties of answers: each holds for those of a right engine, and fails for broken ones."""

from __future__ import annotations

import pytest

from loragate.core.sequential import Decision
from loragate.engine.properties import (
    Property,
    a_permuted_batch_permutes,
    adapters_differ_from_base,
    alone_equals_mixed,
    liveness,
    reload_serves_the_new_weights,
)
from loragate.engine.requests import Completion

ONE, TWO, ODD = Completion((1, 2)), Completion((3, 4)), Completion((1, 9))


def reload(after: Completion, wanted: Completion) -> Property:
    return reload_serves_the_new_weights("a", "b", before=ONE, after=after, wanted=wanted)


@pytest.mark.parametrize(
    "found",
    [
        adapters_differ_from_base(ONE, {"a": TWO}),
        a_permuted_batch_permutes([ONE, TWO], [ONE, TWO]),
        alone_equals_mixed(1, TWO, TWO),
        reload(TWO, TWO),
    ],
    ids=lambda found: found.name,
)
def test_a_property_holds_and_has_nothing_to_say(found: Property) -> None:
    assert (found.decision, found.details) == (Decision.PASS, ())


@pytest.mark.parametrize(
    ("found", "details"),
    [
        # the rest of a text may differ by chance, the first token decides
        (
            adapters_differ_from_base(ONE, {"a": ODD, "b": TWO, "c": ONE}),
            ["a answers as the base model: 1 9", "c answers as the base model: 1 2"],
        ),
        (
            adapters_differ_from_base(Completion(()), {"a": Completion(())}),
            ["a answers as the base model: nothing"],
        ),
        (
            a_permuted_batch_permutes([ONE, TWO], [ONE, ODD]),
            ["request 1 is answered 1 9 in another place of the same batch (before: 3 4)"],
        ),
        (
            alone_equals_mixed(4, TWO, ODD),
            ["request 4 is answered 1 9 alone and 3 4 in a batch"],
        ),
        (
            reload(ONE, TWO),
            ["a with the weights of b answers as before, 1 2, b itself 3 4"],
        ),
        (reload(ODD, TWO), ["a with the weights of b answers 1 9, b itself 3 4"]),
    ],
)
def test_each_answer_that_breaks_a_property_is_told(found: Property, details: list[str]) -> None:
    assert (found.decision, list(found.details)) == (Decision.FAIL, details)


@pytest.mark.parametrize("before", [ONE, TWO])
def test_a_reload_that_answers_as_its_weights_may_be_wrong_as_they_are(before: Completion) -> None:
    found = reload_serves_the_new_weights(
        "a", "b", before=before, after=TWO, wanted=TWO, defects=["one line", "another line"]
    )
    assert (found.decision, found.details) == (
        Decision.FAIL,
        (
            "after a was loaded with the weights of b: one line",
            "after a was loaded with the weights of b: another line",
        ),
    )


def test_a_reload_of_weights_that_answer_the_same_shows_nothing() -> None:
    found = reload(ONE, ONE)
    assert found.decision is Decision.UNDECIDED
    assert found.details == (
        "a and b answer the same, so that an exchange of their weights shows nothing",
    )


@pytest.mark.parametrize(
    ("counts", "decision", "details"),
    [
        ({"drafts": 5, "graphs": 1}, Decision.PASS, ()),
        (
            {"drafts": 5, "graphs": None},
            Decision.PASS,
            ("the engine does not count graphs",),
        ),
        (
            {"drafts": 0, "graphs": None},
            Decision.FAIL,
            ("none of these in a case that asks for them: drafts",),
        ),
        (
            {"drafts": None, "graphs": None},
            Decision.UNDECIDED,
            ("the engine does not count drafts, graphs",),
        ),
        ({}, Decision.UNDECIDED, ()),
    ],
)
def test_what_takes_part_has_a_count(
    counts: dict[str, int | None], decision: Decision, details: tuple[str, ...]
) -> None:
    found = liveness(counts)
    assert (found.decision, found.details) == (decision, details)
